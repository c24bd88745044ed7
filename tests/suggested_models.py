"""Makes the heads of the suggested models' GGUF files, and the figures of `assets/models.json` from them.

The shapes are published; the types of tensors are those that llama.cpp's quantizer chooses. A file is as long as the
published one but holds no weights, so that Quire plans it as it would plan the real one.
`python -m tests.suggested_models` prints the figures.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from math import prod
from pathlib import Path
from unittest.mock import patch

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from quire.config import EngineConfig
from quire.engine.plan import plan_engine
from quire.engine.suggested import CONTEXT


@dataclass(frozen=True)
class Shape:
    """The sizes of a published model, by the names of its config."""

    arch: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    context: int
    tied: bool = True
    experts: int = 0
    drawn: int = 0
    kind: str = "Q4_K_M"


SHAPES = {
    "Qwen/Qwen3-0.6B-GGUF": Shape("qwen3", 28, 1024, 16, 8, 128, 3072, 151936, 40960, kind="Q8_0"),
    "Qwen/Qwen3-1.7B-GGUF": Shape("qwen3", 28, 2048, 16, 8, 128, 6144, 151936, 40960, kind="Q8_0"),
    "bartowski/Llama-3.2-3B-Instruct-GGUF": Shape("llama", 28, 3072, 24, 8, 128, 8192, 128256, 131072),
    "Qwen/Qwen3-4B-GGUF": Shape("qwen3", 36, 2560, 32, 8, 128, 9728, 151936, 40960),
    "Qwen/Qwen3-8B-GGUF": Shape("qwen3", 36, 4096, 32, 8, 128, 12288, 151936, 40960, tied=False),
    "Qwen/Qwen3-14B-GGUF": Shape("qwen3", 40, 5120, 40, 8, 128, 17408, 151936, 40960, tied=False),
    "ggml-org/gpt-oss-20b-GGUF": Shape(
        "gpt-oss", 24, 2880, 64, 8, 64, 2880, 201088, 131072, tied=False, experts=32, drawn=4, kind="MXFP4"
    ),
    "Qwen/Qwen3-30B-A3B-GGUF": Shape(
        "qwen3moe", 48, 2048, 32, 4, 128, 768, 151936, 40960, tied=False, experts=128, drawn=8
    ),
}


def tensors(shape: Shape) -> dict[str, tuple[tuple[int, ...], Type]]:
    """List the tensors of a file, by name: shape and type."""
    one = {"Q8_0": Type.Q8_0, "MXFP4": Type.Q8_0}.get(shape.kind)
    body, better = (one, one) if one else (Type.Q4_K, Type.Q6_K)
    routed = Type.MXFP4 if shape.kind == "MXFP4" else body
    h, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    found: dict[str, tuple[tuple[int, ...], Type]] = {}
    if shape.arch == "llama":
        found["rope_freqs.weight"] = ((shape.head_dim // 2,), Type.F32)
    found |= {
        "token_embd.weight": ((shape.vocab, h), better if shape.tied else body),
        "output_norm.weight": ((h,), Type.F32),
    }
    if not shape.tied:
        found["output.weight"] = ((shape.vocab, h), better)
    oss, n = shape.arch == "gpt-oss", shape.layers
    for i in range(n):
        more = i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2
        high = better if more else body
        layer: dict[str, tuple[tuple[int, ...], Type]] = {
            "attn_norm": ((h,), Type.F32),
            "attn_q": ((q, h), body),
            "attn_k": ((kv, h), body),
            "attn_v": ((kv, h), high),
            "attn_output": ((h, q), body),
            "post_attention_norm" if oss else "ffn_norm": ((h,), Type.F32),
        }
        if shape.arch.startswith("qwen3"):
            layer |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), ((shape.head_dim,), Type.F32))
        stack, end = ((shape.experts,), "_exps") if shape.experts else ((), "")
        layer |= {
            f"ffn_gate{end}": ((*stack, shape.inner, h), routed),
            f"ffn_up{end}": ((*stack, shape.inner, h), routed),
            f"ffn_down{end}": ((*stack, h, shape.inner), routed if oss else high),
        }
        if shape.experts:
            layer["ffn_gate_inp"] = ((shape.experts, h), Type.F32)
        found |= {f"blk.{i}.{name}.weight": about for name, about in layer.items()}
        if oss:
            biased = [name for name in layer if name.startswith(("attn_", "ffn_")) and "norm" not in name]
            found |= {f"blk.{i}.{name}.bias": (layer[name][0][:-1], Type.F32) for name in biased}
            found[f"blk.{i}.attn_sinks.weight"] = ((shape.heads,), Type.F32)
    return found


def write_head(path: Path, shape: Shape) -> Path:
    """Write a file with the head of a model, and room for its weights."""
    writer = gguf.GGUFWriter(path, shape.arch)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_feed_forward_length(shape.inner)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(shape.vocab)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.drawn)
        writer.add_expert_feed_forward_length(shape.inner)
    if shape.arch == "gpt-oss":
        writer.add_sliding_window(128)
    size = 0
    for name, (dims, kind) in tensors(shape).items():
        block, nbytes = gguf.GGML_QUANT_SIZES[kind]
        length = prod(dims) // block * nbytes
        stored = (*dims[:-1], dims[-1] // block * nbytes) if kind != Type.F32 else dims
        dtype = np.dtype(np.float32 if kind == Type.F32 else np.uint8)
        writer.add_tensor_info(name, stored, dtype, length, raw_dtype=kind)
        size += -(-length // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    start = -(-path.stat().st_size // 32) * 32
    with path.open("r+b") as file:
        file.truncate(start + size)
        file.seek(start)
        file.write(np.ones(shape.head_dim // 2 if shape.arch == "llama" else 0, np.float32).tobytes())
    return path


def figures(model: str, folder: Path) -> dict[str, int]:
    """Plan a model as `quire serve` would, and give its figures by the names of the table."""
    path = write_head(folder / "model.gguf", SHAPES[model])
    config = EngineConfig.from_options(model=str(path), max_model_len=CONTEXT, num_gpu_blocks_override=1024)
    with patch("quire.devices.cpu.backend.free_memory", lambda: 1 << 40):
        plan = plan_engine(config)
    kv = CONTEXT * plan.kv_spec.bytes_per_token
    return {
        "parameters": plan.model.num_parameters,
        "bytes": path.stat().st_size,  # without the tokenizer
        "context": SHAPES[model].context,
        "memory": plan.memory.weights + plan.memory.workspace + kv,
        "read": round(plan.cost.step_bytes() + plan.cost.kv_bytes(CONTEXT // 4, plan.kv_spec)),
    }


if __name__ == "__main__":
    for name in SHAPES:
        with tempfile.TemporaryDirectory() as place:
            print(json.dumps({"model": name, **figures(name, Path(place))}))
