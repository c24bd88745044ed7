"""Operations that one kernel computes together: fewer launches, and the bits that they have one by one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

import numpy as np
import torch

from quire.devices.cuda import fuse
from quire.devices.cuda.backend import CudaBackend
from quire.devices.cuda.jit import InterpretedLauncher
from quire.devices.cuda.kernels.norm import NormTensors, Sum, normalize
from quire.devices.cuda.launch import Launch
from quire.devices.cuda.target import INTERPRETER
from quire.devices.graph import record
from quire.devices.ops import Add, Embed, Linear, Normalize, SelectRows, Tap, Value
from quire.devices.protocol import KVSpec, Limits, ModelInput, Norm
from quire.devices.registry import make_backend
from quire.weights.schemes import scheme
from tests.models import inspect_model, load_model
from tests.tiny import write_checkpoint


class Counting:
    """The interpreter, which counts launches by kernel."""

    target = INTERPRETER

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()

    def __call__(self, launch: Launch) -> None:
        self.names[launch.kernel.__name__] += 1
        InterpretedLauncher()(launch)


def row(*values: int) -> Any:
    return np.array(values, np.int32)


STEP = ModelInput(
    row(3, 9, 4, 7), row(0, 1, 0, 1), row(0, 2, 4), row(2, 2), row(0, 1), row(1, 2).reshape(2, 1), row(1, 3)
)


def ran(backend: Any, graph: Any, spec: KVSpec, adapters: int = 0) -> tuple[Counter[str], list[Any]]:
    """The launches of a step by kernel, and the bytes of its logits, hidden states and taps."""
    backend._run = counting = Counting()
    executable = backend.compile(graph, backend.kv_cache(spec, 4, 16), Limits(8, 2, 2, adapters))
    logits = executable.run(STEP).numpy().tobytes()
    taps = [np.asarray(tap).tobytes() for tap in executable.taps()]
    return counting.names, [logits, np.asarray(executable.hidden()).tobytes(), *taps]


def codes_alone(found: fuse.Found) -> fuse.Edits:
    """Rows rounded by a kernel of its own."""
    return fuse.codes_of_products(fuse.Found(found.graph, adapters=True))


FEWER = [
    ("gemma2", None, {"added": 4, "norm": 3}),
    ("olmo2", None, {"added": 4}),
    ("granite", None, {"added": 3}),
    ("gpt2", None, {"added": 1}),
    ("mixtral", None, {"added": 1}),
    ("qwen3", "int8", {"round_row": 4}),
    ("gemma2", "int8", {"added": 4, "norm": 3, "round_row": 4}),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("family", "quantization", "fewer"), FEWER, ids=lambda value: str(value)[:12])
def test_bits_are_those_of_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, quantization: Any, fewer: Any, dtype: str
) -> None:
    layers = "n_layer" if family == "gpt2" else "num_hidden_layers"
    model = write_checkpoint(tmp_path, family, dtype, **{layers: 2})
    backend = make_backend(threads=1, device="interpreter")
    graph = load_model(model, backend, quantized=scheme(quantization) if quantization else None).graph
    spec = inspect_model(model).kv_spec("bfloat16")
    names, found = ran(backend, graph, spec)
    assert ran(backend, graph, spec, adapters=1)[1] == found
    monkeypatch.setattr(fuse, "PATTERNS", (codes_alone,))
    apart, wanted = ran(backend, graph, spec)
    assert found == wanted
    assert apart - names == fewer
    assert not names - apart


@pytest.mark.parametrize("seed", range(12))
def test_whatever_reads_a_value(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Sums, norms and products that read any earlier values."""
    backend, rng = (
        CudaBackend(None, make_backend(threads=1, device="interpreter").choices),
        np.random.default_rng(seed),
    )
    spec = KVSpec(1, 1, 16, "bfloat16")

    def weight(rows: int, columns: int) -> Any:
        return backend.matrix([rng.standard_normal((rows, columns), np.float32) / 6], "bfloat16")

    def hidden(g: Any) -> Any:
        made = [g(Embed(weight(50, 32)))]

        def some() -> Value:
            return made[-1 - min(int(rng.exponential(0.8)), len(made) - 1)]

        for kind in rng.choice(4, 14, p=[0.4, 0.4, 0.15, 0.05]):
            norm = Norm(str(rng.choice(["rms", "layer"])), rng.random(32, np.float32), None, 1e-5)  # type: ignore[arg-type]
            ops = [
                lambda: Add(some(), some(), float(rng.choice([1.0, 0.3]))),
                lambda norm=norm: Normalize(some(), norm),
                lambda: Linear(some(), weight(32, 32), residual=some()),
                lambda: Tap(some()),
            ]
            made.append(g(ops[kind]()))
        return g(SelectRows(g(Add(some(), some()))))

    graph = record(hidden, lambda g, x: g(Linear(x, weight(50, 32))), 50, 32)
    names, found = ran(backend, graph, spec)
    monkeypatch.setattr(fuse, "PATTERNS", ())
    apart, wanted = ran(backend, graph, spec)
    assert found == wanted
    assert names.total() <= apart.total()


def test_a_norm_with_codes_equals_the_norm_then_its_codes() -> None:
    """By torch alone: the codes of a row are the nearest to it."""
    x, other = (torch.randn(3, 40, generator=torch.Generator().manual_seed(i)).bfloat16() for i in (1, 2))
    by = NormTensors("rms", torch.rand(40) + 0.5, None, 1e-6)
    total, out, codes, scales = (
        x.new_empty(3, 40),
        x.new_empty(3, 40),
        torch.empty(3, 40, dtype=torch.int8),
        torch.empty(3),
    )
    normalize(
        InterpretedLauncher(), x, out, by, summed=Sum(other, (1.0, 0.5), total, by), codes=(codes, scales)
    )

    def normed(y: Any) -> Any:
        y = y.double()
        return (y / (y.square().mean(1, keepdim=True) + 1e-6).sqrt() * by.weight).bfloat16()

    assert torch.equal(total, (normed(x).double() + 0.5 * other.double()).bfloat16())
    assert torch.allclose(out.double(), normed(total).double(), rtol=1e-2)
    assert torch.equal(scales, out.float().abs().amax(1) / 127)
    assert ((codes * scales[:, None] - out.float()).abs() <= scales[:, None] * 0.5001).all()
