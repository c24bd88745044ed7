"""Files that llama.cpp's own tools made: weights bit for bit, and products near those of the values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.devices.cpu.backend import NativeBackend
from quire.model.gguf import read_gguf
from quire.weights.hub import open_tokenizer
from quire.weights.layouts import Blocks
from quire.weights.schemes import Quantized
from tests.devices.native_cases import EXACT
from tests.model.tiny_models import Session
from tests.models import load_model
from tests.near import assert_near

PROMPT = {"prompt_token_ids": [(7 * i) % 500 for i in range(40)]}


@pytest.fixture(scope="module")
def files(data: Path) -> list[Path]:
    return sorted((data / "gguf-llamacpp").glob("*.gguf"))


def test_packed_weights_are_those_of_the_gguf_package(files: list[Path]) -> None:
    backend, kinds = NativeBackend(2), set()
    for path in files:
        for tensor in gguf.GGUFReader(path).tensors:
            kind = tensor.tensor_type.name.lower()
            if kind in ("f32", "bf16"):
                continue
            kinds.add(kind)
            raw = np.asarray(tensor.data).reshape(-1, tensor.data.shape[-1])
            matrix = backend.matrix([Blocks(kind).tensor(raw)], Quantized(Blocks(kind)))
            wanted = gguf.quants.dequantize(raw, tensor.tensor_type)
            assert matrix.dequantize().tobytes() == wanted.tobytes(), (path.name, tensor.name)
    assert {"q8_0", "q4_k", "q6_k", "q2_k", "iq4_xs", "iq3_s", "tq2_0", "mxfp4"} <= kinds


def _logprobs(path: Path, **options: Any) -> Any:
    llm = LLM(str(path), max_model_len=64, max_logprobs=-1, threads=2, **options)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, logprobs=-1)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    rows = [row for row in output.prompt_logprobs if row is not None]
    return np.array([[row[token].logprob for token in sorted(row)] for row in rows])


@pytest.mark.parametrize(
    "name", ["llama-Q4_K_M", "llama-Q8_0", "llama-IQ3_S", "qwen3moe-Q4_K_M", "qwen3moe-MXFP4_MOE"]
)
def test_logits_are_near_those_of_a_float_model_with_the_values(name: str, data: Path) -> None:
    path = data / "gguf-llamacpp" / f"{name}.gguf"
    wanted = _logprobs(path, dtype="float32")
    exact = _logprobs(path, quantization_activations="float", isa=EXACT)
    assert_near(exact, wanted)
    rounded = _logprobs(path)
    divergence = (np.exp(wanted) * (wanted - rounded)).sum(axis=1).mean()
    assert 0 < divergence < 0.05


# What rounding activations costs llama.cpp itself: the mean divergence that `llama-perplexity --kl-divergence` prints
# (llama-cpp-python 0.3.36; -f text-tinyshakespeare/input.txt -c 128 --chunks 16) against a float32 file of the values.
LLAMACPP_DIVERGENCE = {
    "llama-Q8_0": 0.002906,
    "llama-Q6_K": 0.016659,
    "llama-Q5_K_M": 0.017485,
    "llama-Q4_K_M": 0.017322,
    "llama-Q4_0": 0.009943,
    "llama-IQ4_XS": 0.015569,
    "llama-IQ3_S": 0.018901,
    "qwen3moe-Q4_K_M": 0.000022,
}


@pytest.mark.parametrize("name", LLAMACPP_DIVERGENCE)
def test_rounded_activations_cost_what_they_cost_llama_cpp(name: str, data: Path) -> None:
    """Over the second half of each chunk of 128 tokens, as llama-perplexity counts."""
    path, backend = data / "gguf-llamacpp" / f"{name}.gguf", NativeBackend(2)
    text = (data / "text-tinyshakespeare" / "input.txt").read_text()[:20000]
    tokens = open_tokenizer(path).encode(text)[: 16 * 128]
    models = [load_model(path, backend, dtype="float32"), load_model(path, backend)]
    divergences = []
    for start in range(0, len(tokens), 128):
        exact, rounded = (
            _second_half(Session(model, backend), tokens[start : start + 128]) for model in models
        )
        divergences.append((np.exp(exact) * (exact - rounded)).sum(axis=1).mean())
    assert len(divergences) == 16
    assert 0 < np.mean(divergences) <= 1.1 * LLAMACPP_DIVERGENCE[name]


def _second_half(session: Session, tokens: list[int]) -> Any:
    """Log-probabilities of the second half's tokens but the first, float64."""
    session.feed(tokens[:64])
    logits = session.feed(tokens[64:])[:-1].astype(np.float64)
    return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


def test_memory_holds_the_bytes_of_the_file(files: list[Path]) -> None:
    for path in files:
        tensors, backend = read_gguf(path).checkpoint, NativeBackend(2)
        held = packed = 0
        for name in tensors.names():
            layout = tensors.layout(name)
            if layout is not None:
                whole = tensors.quantized(name, np.arange(int(np.prod(tensors.shape(name)[:-1]))))
                held += whole.codes.nbytes
                packed += backend.matrix([whole], Quantized(layout)).nbytes
        assert packed <= 1.08 * held, path.name
