"""Stages over the whole engine: ways to launch, steps without memory, and a model of Llama-3.1-8B's shape."""

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
from bench.visit.shapes import FORMS, LLAMA_8B, TINY, options_of, write_model
from quire import LLM, SamplingParams
from quire.build import build_engine
from quire.config import EngineConfig
from quire.devices.artifacts import Artifacts
from quire.devices.cuda import cubins
from quire.devices.cuda import run as cuda_run
from quire.devices.cuda.jit import JitLauncher
from quire.devices.cuda.selfcheck import Checks, fingerprint
from quire.devices.selection import VERDICTS

# Tokens of a prompt and of its answer: requests at once, fewer than memory holds, and TensorRT-LLM's tokens/s at
# saturation for FP8 weights on an H100.
RUNS = {
    (128, 128): (512, 28_312), (1000, 1000): (128, 15_220), (2048, 2048): (48, 9_305), (5000, 500): (24, 3_459),
    (20_000, 2000): (6, 1_351),
}  # fmt: skip
LEAST = 30.0  # seconds that must be left to load another form, or to begin another run
DECODED = 32  # tokens after the first, over which a step is averaged
CHECKS = {"greedy": {}, "seeded": {"temperature": 1.0, "top_p": 0.9, "seed": 7}}


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
        options, prompts = options_of(place.device, TINY), prompts_of(2, 9, TINY)
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


def routes(place: Place, packed: Path) -> None:
    """The same answers, log-probabilities included, by all ways of launching kernels; and what a step takes by each."""
    shape = TINY if place.small else LLAMA_8B | {"num_hidden_layers": 2}
    prompts, tokens = prompts_of(*((2, 9) if place.small else (8, 200)), shape), 2 if place.small else DECODED
    built = packed / "artifacts"
    ways: dict[str, tuple[Any, dict[str, Any]]] = {
        "cubins by the driver, graphs": (None, {}),
        "cubins by the driver, kernel by kernel": (None, {"enforce_eager": True}),
        "Triton's own launches, graphs": (lambda target, folder: JitLauncher(target), {}),
        "packed cubins, graphs": (
            lambda target, folder: cubins.CubinLauncher(target, cubins.Driver(), Artifacts.opened(built, ""), None), {}
        ),
    }  # fmt: skip
    if place.small or not built.is_dir():
        del ways["packed cubins, graphs"]
    if place.small:
        del ways["Triton's own launches, graphs"]
    wanted: list[Any] = []

    def tried(model: str, way: str, launcher: Any, more: dict[str, Any]) -> None:
        with (
            patch.object(cubins, "gpu_launcher", launcher or cubins.gpu_launcher),
            LLM(model=model, **options_of(place.device, shape, **more)) as llm,
        ):
            begin = time.perf_counter()
            found, taken = generated(llm, prompts, tokens, logprobs=2), [time.perf_counter() - begin]
            for count in (1, 1 + tokens):
                begin = time.perf_counter()
                generated(llm, prompts[:1], count)
                taken.append(time.perf_counter() - begin)
        wanted.append(found)
        figures = (
            {"first_s": taken[0], "step_us": (taken[2] - taken[1]) / tokens * 1e6} if place.times else {}
        )
        rounded = {name: round(value, 2) for name, value in figures.items()}
        place.row(f"answers by {way}", found == wanted[0], **rounded)

    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), shape)
        for way, about in ways.items():
            place.attempt(way, tried, model, way, *about)


def engine(place: Place, layers: int, scale: float) -> None:
    """Bits, latency and throughput of an 8B model in each form; `layers` shortens it, `scale` times the requests."""
    shape = TINY if place.small else LLAMA_8B | {"num_hidden_layers": layers}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), shape)
        for name, form in [*FORMS.items()][: 1 if place.small else None]:
            if place.until - time.monotonic() < (2 if place.small else LEAST):
                place.row(f"{name}: left out, no time")
                continue
            place.attempt(name, one_form, place, model, name, form, shape, scale)
            torch.cuda.empty_cache()


def one_form(
    place: Place, model: str, name: str, form: dict[str, Any], shape: dict[str, Any], scale: float
) -> None:
    begin = time.monotonic()
    with LLM(model=model, **options_of(place.device, shape, **form)) as llm:
        place.row(f"{name}: loaded", seconds=round(time.monotonic() - begin, 1))
        verdicts(place, name)
        if form.get("batch_invariant", True):
            alone_is_batched(place, llm, name, shape)
        latency(place, llm, name, shape)
        throughput(place, llm, name, shape, scale)


def verdicts(place: Place, name: str) -> None:
    """What the check of a first start has found on this GPU, of all models so far, libraries included."""
    if place.small:
        return
    device, path = fingerprint(torch.device("cuda:0"), place.run.target.name), Path.home() / VERDICTS
    found = Checks(path, True).of(device)
    bad = [key for key, verdict in found.items() if not (verdict.accurate and verdict.exact)]
    admitted = {
        product: verdict["sizes"]
        for key, verdicts in (json.loads(path.read_text()) if path.exists() else {}).items()
        for product, verdict in verdicts.items()
        if key.startswith(f"{device}, ") and verdict.get("sizes")
    }
    place.row(f"{name}: check of {len(found)} kernels", not bad, bad=bad[:4], admitted=admitted)


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
    for batch in (2,) if place.small else (1, 4, 16, 64, 256):
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
        place.known[f"{name}: {batch}"] = step
        floor = read_bytes(name, shape, batch * length) / (place.known.get("copy gbs", np.inf) * 1e9)
        figures = {
            "step_ms": step * 1e3,
            "floor_ms": floor * 1e3,
            "prompts_ms": taken[1] * 1e3,
            "tok_s": batch / step,
        }
        exact = place.known.get(f"{name.removesuffix(', any order')}: {batch}", step)
        if exact != step:
            figures["exact_over_any_order"] = step / exact
        rounded = {key: round(value, 2) for key, value in figures.items()}
        place.row(f"{name}: {batch} sequences", **rounded, share=round(floor / step, 3))


def read_bytes(name: str, shape: dict[str, Any], tokens: int) -> float:
    """Count what a decode step reads: weights but the table of embeddings, and keys and values of `tokens` tokens."""
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    kept = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    layer = hidden * (2 * hidden + 2 * kept + 3 * shape["intermediate_size"])
    weights = (layers * layer + shape["vocab_size"] * hidden) * (1 if name.startswith(("int8", "FP8")) else 2)
    return float(weights + tokens * layers * 2 * kept * (1 if "cache" in name else 2))


def least_seconds(
    place: Place, name: str, shape: dict[str, Any], count: int, length: int, tokens: int
) -> float:
    """The least seconds of requests: products of their prompts, then bytes of each step."""
    rate, peak = (
        place.known.get("copy gbs", np.inf) * 1e9,
        place.known.get("bf16 product tflops", np.inf) * 1e12,
    )
    weights = read_bytes("", shape, 0) / 2
    bytes_read = (read_bytes(name, shape, count * (length + done)) for done in range(tokens))
    return float(2 * weights * count * length / peak + sum(bytes_read) / rate)


def throughput(place: Place, llm: Any, name: str, shape: dict[str, Any], scale: float) -> None:
    """Output tokens per second of many requests at once, from their arrival to their end."""
    runs = {(9, 2): (2, 0)} if place.small else RUNS if place.times else {}
    for (length, tokens), (usual, reference) in runs.items():
        title, count = f"{name}: requests of {length} + {tokens}", max(1, round(usual * scale))
        if place.until - time.monotonic() < LEAST and not place.small:
            place.row(f"{title}: left out, no time")
            continue
        begin = time.perf_counter()
        made = generated(llm, prompts_of(count, length, shape), tokens)
        seconds = time.perf_counter() - begin
        done, least = (
            sum(len(ids) for ids, _ in made),
            least_seconds(place, name, shape, count, length, tokens),
        )
        figures: dict[str, Any] = {
            "requests": count, "tok_s": round(done / seconds), "tensorrt_llm_fp8_h100": reference,
            "floor_tok_s": round(done / least) if least else None, "share": round(least / seconds, 3),
        }  # fmt: skip
        place.row(title, **(figures if place.times else {"ran": True}))
