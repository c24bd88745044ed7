"""Files that llama.cpp's own tools made: weights bit for bit, and products near those of the values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.devices.cpu.backend import NativeBackend
from quire.weights.layouts import Blocks
from quire.weights.schemes import Quantized
from quire.weights.source import open_source

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
    exact = _logprobs(path, quantization_activations="float")
    np.testing.assert_allclose(exact, wanted, atol=1e-4)
    rounded = _logprobs(path)
    divergence = (np.exp(wanted) * (wanted - rounded)).sum(axis=1).mean()
    assert 0 < divergence < 0.05


def test_memory_holds_the_bytes_of_the_file(files: list[Path]) -> None:
    for path in files:
        source = open_source(path)
        tensors, backend = source.tensors(), NativeBackend(2)
        held = packed = 0
        for name in tensors.names():
            layout = tensors.layout(name)
            if layout is not None:
                whole = tensors.quantized(name, np.arange(int(np.prod(tensors.shape(name)[:-1]))))
                held += whole.codes.nbytes
                packed += backend.matrix([whole], Quantized(layout)).nbytes
        assert packed <= 1.08 * held, path.name
