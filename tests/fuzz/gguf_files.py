"""GGUF files for the fuzzer: their headers, and the blocks that their tensors hold."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from quire import LLM, SamplingParams
from quire.model.gguf import read_gguf
from quire.weights.gguf.container import GGUFFile
from quire.weights.gguf.kinds import KINDS, PLAIN, Kind
from quire.weights.gguf.tokenizer import read_tokenizer
from tests.fuzz.mutate import mutate_bytes, read_all

Case = Callable[[Random], None]


def fuzz_gguf(folder: Path) -> Case:
    """A file's header is changed; all of it is read: config, tokenizer and tensors."""
    from_scratch = _gguf_bytes()
    path = folder / "model.gguf"
    path.write_bytes(from_scratch)
    GGUFFile(path)

    def case(rng: Random) -> None:
        path.write_bytes(mutate_bytes(rng, from_scratch))
        read_tokenizer(GGUFFile(path))
        read_all(read_gguf(path).checkpoint)

    return case


def fuzz_gguf_blocks(folder: Path) -> Case:
    """Blocks of every type hold any bytes, or the file ends inside them; models that are taken write a few tokens."""
    kinds = [kind for kind in KINDS.values() if kind.name not in PLAIN]
    path = folder / "blocks.gguf"

    def case(rng: Random) -> None:
        kind = rng.choice(kinds)
        sound = _gguf_bytes(kind, 256)
        data, start = bytearray(sound), len(sound) // 8  # the header is shorter
        for _ in range(rng.randint(1, 4)):
            count = rng.choice((1, 2, kind.nbytes, 4096, len(data)))
            at = rng.randrange(start, len(data))
            end = min(at + count, len(data))
            fill = rng.choice((b"\xff", b"\x00", b"\x7c", b""))
            data[at:end] = fill * (end - at) if fill else rng.randbytes(end - at)
        if rng.random() < 0.2:
            del data[rng.randrange(start, len(data)) :]
        path.write_bytes(data)
        options: dict[str, Any] = {"quantization_activations": rng.choice(("int8", "float"))}
        if rng.random() < 0.2:
            options = {"dtype": "float32"}
        limits = {
            "num_gpu_blocks_override": 16,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 2,
            "threads": 1,
        }
        with LLM(str(path), **limits, **options) as llm:
            llm.generate(["ab", "a"], SamplingParams(max_tokens=3, temperature=0), use_tqdm=False)

    return case


def _gguf_bytes(kind: Kind = KINDS[0], width: int = 32) -> bytes:
    """A whole Llama of one layer, written plainly by the format's description; matrices are of `kind`, all zeros."""

    def text(value: str) -> bytes:
        data = value.encode()
        return struct.pack("<Q", len(data)) + data

    def pair(key: str, kind: int, value: bytes) -> bytes:
        return text(key) + struct.pack("<I", kind) + value

    def array(key: str, kind: int, values: list[bytes]) -> bytes:
        return pair(key, 9, struct.pack("<IQ", kind, len(values)) + b"".join(values))

    tokens = [f"<0x{i:02X}>" for i in range(256)] + ["<unk>", "<s>", "</s>", "a", "b", "ab", "▁", "▁a"]
    kinds = [6] * 256 + [2, 3, 3, 1, 1, 1, 1, 1]
    numbers = {
        "context_length": 64,
        "embedding_length": width,
        "block_count": 1,
        "feed_forward_length": width,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "rope.dimension_count": width // 2,
    }
    pairs = [
        pair("general.architecture", 8, text("llama")),
        *(pair(f"llama.{key}", 4, struct.pack("<I", value)) for key, value in numbers.items()),
        pair("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)),
        pair("tokenizer.ggml.model", 8, text("llama")),
        array("tokenizer.ggml.tokens", 8, [text(token) for token in tokens]),
        array("tokenizer.ggml.scores", 6, [struct.pack("<f", -i) for i in range(len(tokens))]),
        array("tokenizer.ggml.token_type", 5, [struct.pack("<i", kind) for kind in kinds]),
        *(pair(f"tokenizer.ggml.{name}_token_id", 4, struct.pack("<I", i)) for name, i in
          (("unknown", 256), ("bos", 257), ("eos", 258))),
    ]  # fmt: skip
    shapes = {"token_embd": (len(tokens), width), "output": (len(tokens), width), "output_norm": (width,)}
    half = width // 2
    layer = {"attn_norm": (width,), "attn_q": (width, width), "attn_k": (half, width), "attn_v": (half, width),
             "attn_output": (width, width), "ffn_norm": (width,), "ffn_gate": (width, width), "ffn_up": (width, width),
             "ffn_down": (width, width)}  # fmt: skip
    shapes |= {f"blk.0.{name}": shape for name, shape in layer.items()}
    entries, offset = b"", 0
    for name, shape in shapes.items():
        entries += text(f"{name}.weight") + struct.pack("<I", len(shape))
        used = kind if len(shape) == 2 else KINDS[0]
        entries += struct.pack(f"<{len(shape)}Q", *reversed(shape)) + struct.pack("<IQ", used.code, offset)
        size = int(np.prod(shape)) // used.block * used.nbytes
        offset += size + -size % 32
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(pairs)) + b"".join(pairs) + entries
    return head + bytes(-len(head) % 32) + bytes(offset)
