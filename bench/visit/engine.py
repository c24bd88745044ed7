"""Stages over the whole engine: a model of Llama-3.1-8B's shape with random weights, and steps without memory."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from bench.visit.place import Place
from quire import LLM, SamplingParams
from quire.build import build_engine
from quire.config import EngineConfig
from quire.devices.cuda import run as cuda_run

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "rope_theta": 5e5,
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
TINY = LLAMA_8B | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320,
}  # fmt: skip
FORMS = {"bf16": {}, "bf16, FP8 cache": {"kv_cache_dtype": "fp8"}, "int8": {"quantization": "int8"}}
# Tokens of a prompt and of its answer: how many at once, and TensorRT-LLM's tokens/s for FP8 weights on an H100.
RUNS = {(128, 128): (512, 28_312), (2048, 128): (96, 3_450), (1000, 1000): (128, 15_220)}
DECODED = 32  # tokens after the first, over which a step is averaged
CHECKS = {"greedy": {}, "seeded": {"temperature": 1.0, "top_p": 0.9, "seed": 7}}


def write_model(folder: Path, shape: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    return str(folder)


def options_of(place: Place, shape: dict[str, Any], **more: Any) -> dict[str, Any]:
    sizes = {"max_model_len": 4096, "max_num_seqs": 256}
    if shape is TINY:
        sizes = {"max_model_len": 96, "num_gpu_blocks_override": 12}
    return {"load_format": "dummy", "device": place.device, "enable_prefix_caching": False, **sizes, **more}


def prompts_of(count: int, length: int, shape: dict[str, Any]) -> list[Any]:
    draw = np.random.default_rng(count)
    sizes = (length - i % 3 for i in range(count))
    return [{"prompt_token_ids": draw.integers(3, shape["vocab_size"], size).tolist()} for size in sizes]


def generated(llm: Any, prompts: list[Any], tokens: int, **more: Any) -> list[Any]:
    """Tokens, and log-probabilities to their last bit."""
    params = SamplingParams(**{"max_tokens": tokens, "ignore_eos": True, "temperature": 0.0, **more})
    found = [one.outputs[0] for one in llm.generate(prompts, params, use_tqdm=False)]
    values = ([{t: one.logprob for t, one in p.items()} for p in sample.logprobs or ()] for sample in found)
    return [([*sample.token_ids], logprobs) for sample, logprobs in zip(found, values, strict=True)]


def memory(place: Place) -> None:
    """A small model loaded in both ways, and in steps that find no memory."""
    with tempfile.TemporaryDirectory() as folder:
        model, built = write_model(Path(folder) / "model", TINY), Path(folder) / "engine"
        options, prompts = options_of(place, TINY), prompts_of(2, 9, TINY)
        fill, left = cuda_run.CudaStep.fill, [2]

        def failing(*args: Any) -> Any:
            if left[0]:
                left[0] -= 1
                raise torch.OutOfMemoryError("CUDA out of memory (injected)")
            return fill(*args)

        with LLM(model=model, **options) as llm:
            wanted = generated(llm, prompts, 2, logprobs=2)
            with patch.object(cuda_run.CudaStep, "fill", failing):
                found = generated(llm, prompts, 2, logprobs=2)
            place.row("two steps without memory change no bit", found == wanted and not left[0])
        build_engine(EngineConfig.from_options(model=model, **options), built)
        options |= {"load_format": "auto", "skip_tokenizer_init": True}
        with LLM(model=str(built), **options) as llm:
            found = generated(llm, prompts, 2, logprobs=2)
        place.row("an engine directory gives the checkpoint's bits", found == wanted)


def engine(place: Place, layers: int) -> None:
    """Bits, latency and throughput of an 8B model in each form; `layers` shortens it."""
    shape = TINY if place.small else LLAMA_8B | {"num_hidden_layers": layers}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), shape)
        for name, form in [*FORMS.items()][: 1 if place.small else None]:
            begin = time.monotonic()
            with LLM(model=model, **options_of(place, shape, **form)) as llm:
                place.row(f"{name}: loaded", seconds=round(time.monotonic() - begin, 1))
                alone_is_batched(place, llm, name, shape)
                latency(place, llm, name, shape)
                throughput(place, llm, name, shape)
            torch.cuda.empty_cache()


def alone_is_batched(place: Place, llm: Any, name: str, shape: dict[str, Any]) -> None:
    """The same requests together and one by one."""
    prompts, tokens = prompts_of(*((2, 9) if place.small else (16, 300)), shape), 2 if place.small else 24
    for kind, more in CHECKS.items():
        together = generated(llm, prompts, tokens, logprobs=2, **more)
        alone = [generated(llm, [prompt], tokens, logprobs=2, **more)[0] for prompt in prompts]
        differ = sum(here != there for here, there in zip(together, alone, strict=True))
        place.row(f"{name}: alone == batched, {kind}", not differ, requests=len(prompts), differ=differ)


def latency(place: Place, llm: Any, name: str, shape: dict[str, Any]) -> None:
    """A decode step at numbers of sequences, beside the time to read its bytes."""
    for batch in (2,) if place.small else (1, 8, 64, 256):
        length, tokens = (9, 1) if place.small else (128, DECODED)
        prompts, taken = prompts_of(batch, length, shape), []
        for count in (1 + tokens, 1, 1 + tokens):  # the first compiles
            begin = time.perf_counter()
            generated(llm, prompts, count)
            taken.append(time.perf_counter() - begin)
        if not place.times or place.small:
            place.row(f"{name}: {batch} sequences", ran=True)
            continue
        step = (taken[2] - taken[1]) / tokens
        floor = read_bytes(name, shape, batch * length) / (place.known.get("copy gbs", np.inf) * 1e9)
        figures = {
            "step_ms": step * 1e3,
            "floor_ms": floor * 1e3,
            "prompts_ms": taken[1] * 1e3,
            "tok_s": batch / step,
        }
        rounded = {key: round(value, 2) for key, value in figures.items()}
        place.row(f"{name}: {batch} sequences", **rounded, share=round(floor / step, 3))


def read_bytes(name: str, shape: dict[str, Any], tokens: int) -> float:
    """Count what a decode step reads: weights but the table of embeddings, and keys and values of `tokens` tokens."""
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    kept = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    layer = hidden * (2 * hidden + 2 * kept + 3 * shape["intermediate_size"])
    weights = (layers * layer + shape["vocab_size"] * hidden) * (1 if name == "int8" else 2)
    return float(weights + tokens * layers * 2 * kept * (1 if "cache" in name else 2))


def throughput(place: Place, llm: Any, name: str, shape: dict[str, Any]) -> None:
    """Output tokens per second of many requests at once, from their arrival to their end."""
    for (length, tokens), (count, reference) in {(9, 2): (2, 0)}.items() if place.small else RUNS.items():
        begin = time.perf_counter()
        made = generated(llm, prompts_of(count, length, shape), tokens)
        speed = sum(len(ids) for ids, _ in made) / (time.perf_counter() - begin)
        figures = (
            {"tok_s": round(speed), "tensorrt_llm_fp8_h100": reference} if place.times else {"ran": True}
        )
        place.row(f"{name}: {count} requests of {length} + {tokens}", **figures)
