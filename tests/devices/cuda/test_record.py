"""Graphs of operations as launches of kernels: what is refused by name, and numbers at their bounds."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

import numpy as np

from quire.devices.cuda.record import ENCODERS
from quire.devices.graph import record
from quire.devices.operands import Norm
from quire.devices.ops import (
    Add,
    Attend,
    Embed,
    HeadLinear,
    Linear,
    RopeAngles,
    SelectRows,
    StoreKV,
    StoreLatent,
)
from quire.devices.protocol import Attention, KVSpec, Limits, ModelInput, Rope
from quire.devices.reference.backend import ReferenceBackend
from quire.devices.registry import make_backend
from quire.devices.torch.ops import FORMULAS
from quire.errors import ConfigError

WIDTH, VOCAB = 32, 20
SPEC, LIMITS = KVSpec(1, 1, 16, "float32"), Limits(8, 2, 8)


def compiled(backend: Any, layer: Any, spec: KVSpec = SPEC) -> Any:
    """An executable of one layer between a table and a head; `layer(g, matrix, x)` makes [T, 32]."""
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> Any:
        return backend.matrix([rng.standard_normal((rows, columns), np.float32)], "float32")

    graph = record(
        lambda g: g(SelectRows(layer(g, matrix, g(Embed(matrix(VOCAB, WIDTH)))))),
        lambda g, x: g(Linear(x, matrix(VOCAB, WIDTH))),
        VOCAB,
        WIDTH,
    )
    return backend.compile(graph, backend.kv_cache(spec, 2, 16), LIMITS)


STEP = ModelInput(
    np.array([3, 9, 4], np.int32), np.arange(3, dtype=np.int32), np.array([0, 3], np.int32), np.array([3], np.int32),
    np.array([0], np.int32), np.array([[1]], np.int32), np.arange(3, dtype=np.int32),
)  # fmt: skip


def check_equal_to_the_reference(layer: Any, spec: KVSpec = SPEC) -> None:
    backends = make_backend(threads=1, device="interpreter"), ReferenceBackend()
    here, there = (compiled(backend, layer, spec).run(STEP).numpy() for backend in backends)
    np.testing.assert_allclose(here, there, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("more", [{"bias": np.arange(WIDTH, dtype=np.float32)}, {"activation": "sigmoid"}])
def test_heads_may_have_a_bias_and_an_activation(more: dict[str, Any]) -> None:
    check_equal_to_the_reference(
        lambda g, matrix, x: g(HeadLinear(x, [matrix(16, 16) for _ in range(2)], **more))
    )


@pytest.mark.parametrize("rotated", [4, 6])
@pytest.mark.parametrize("stored", [True, False])
def test_latents_rotate_elements_of_any_even_number(rotated: int, stored: bool) -> None:
    """Of latents that another layer stored, the queries alone are computed."""

    def layer(g: Any, matrix: Any, x: Any) -> Any:
        turn = g(RopeAngles(Rope(np.ones(rotated // 2, np.float32))))
        latent, turned = g(Linear(x, matrix(2 * 12, WIDTH))), g(Linear(x, matrix(2 * rotated, WIDTH)))
        kv = g(Linear(x, matrix(12 + rotated, WIDTH)))
        norm = Norm("rms", np.ones(12, np.float32), None, 1e-6)
        q = g(StoreLatent(kv, latent, turned, 0, turn, norm))
        if not stored:
            q = g(StoreLatent(None, latent, turned, 0, turn, None))
        whole = g(Linear(q, matrix(WIDTH, 2 * (12 + rotated))))
        return g(Add(whole, g(Linear(g(Attend(q, 0, 2, Attention(0.2))), matrix(WIDTH, 2 * 12)))))

    spec = KVSpec(1, 1, 12 + rotated, "float32", value_dim=12)
    check_equal_to_the_reference(layer, spec)


def test_every_operation_and_every_function_has_a_kernel() -> None:
    assert FORMULAS.keys() <= ENCODERS.keys()


def test_what_nothing_computes_is_refused_by_name() -> None:
    class Unknown(Linear[Any], frozen=True, eq=False):
        pass

    with pytest.raises(ConfigError, match="the model needs Unknown, which no GPU kernel computes"):
        compiled(
            make_backend(threads=1, device="interpreter"),
            lambda g, matrix, x: g(Unknown(x, matrix(WIDTH, WIDTH))),
        )


def test_queries_may_look_ahead_as_far_as_positions_go() -> None:
    def layer(g: Any, matrix: Any, x: Any) -> Any:
        q = g(StoreKV(g(Linear(x, matrix(4 * 16, WIDTH))), 0, 2))
        return g(Attend(q, 0, 2, Attention(0.2, ahead=2**31 - 2)))

    tokens = np.arange(8, dtype=np.int32)
    bounds, one, table = np.array([0, 8], np.int32), np.array([8], np.int32), np.zeros((1, 1), np.int32)
    step = ModelInput(tokens, tokens, bounds, one, table[0], table, tokens)
    here, there = (
        compiled(make_backend(name, threads=1, device=device), layer).run(step).numpy()
        for name, device in (("auto", "interpreter"), ("reference", "cpu"))
    )
    np.testing.assert_allclose(here, there, rtol=0, atol=1e-4)
