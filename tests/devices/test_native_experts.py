"""Mixtures of experts, latent attention and the small operations of other families: native equals the reference."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.devices.graph import record
from quire.devices.ops import (
    Add,
    Attend,
    Embed,
    EmbedPositions,
    HeadLinear,
    Linear,
    RopeAngles,
    Route,
    RunExperts,
    Scale,
    SelectRows,
    StoreLatent,
)
from quire.devices.protocol import (
    Activation,
    Attention,
    Backend,
    Expert,
    FloatDtype,
    KVSpec,
    Limits,
    Norm,
    Rope,
    Routing,
    WeightType,
)
from quire.devices.reference.backend import ReferenceBackend
from quire.devices.torch.backend import TorchBackend
from quire.weights.layouts import Blocks, Int4, Int8
from quire.weights.schemes import Activations, Quantized
from tests.devices.native_cases import ISAS, apply_rows, native, normal, rounds_activations, rows_step

REFERENCE = ReferenceBackend()
WEIGHTS: list[WeightType] = [
    "float32",
    "float16",
    "bfloat16",
    *(
        Quantized(layout, kind)
        for layout in (Int8(), Int4(32), Blocks("nvfp4"))
        for kind in get_args(Activations)
    ),
    Quantized(Blocks("e4m3"), "float"),
]


@st.composite
def routings(draw: st.DrawFn) -> Routing:
    groups, size = draw(st.sampled_from([(1, 1), (1, 7), (1, 40), (4, 3), (8, 2)]))
    kept = draw(st.integers(1, groups))
    after = draw(st.booleans())
    shared = draw(st.booleans())
    return Routing(
        num_experts=groups * size,
        top_k=draw(st.integers(1, min(kept * size, 8))),
        scoring="softmax" if after else draw(st.sampled_from(["softmax", "sigmoid", "root_softplus"])),
        softmax_after=after,
        renormalize=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        num_groups=groups,
        top_groups=kept,
        group_sum=draw(st.booleans()),
        shared=shared,
        shared_gate=shared and draw(st.booleans()),
    )


@settings(max_examples=80, deadline=None)
@given(routings(), st.booleans(), st.integers(1, 300), st.integers(0, 1000))
def test_routes_equal_the_reference(routing: Routing, corrected: bool, rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = 2 * normal(rng, rows, routing.num_experts + routing.shared_gate)
    correction = 0.2 * normal(rng, routing.num_experts) if corrected else None
    chosen = routing.top_k + routing.shared
    ours, theirs = (
        apply_rows(backend, scores, lambda g, x: g(Route(x, routing, correction)), 2 * chosen)
        for backend in (native(), REFERENCE)
    )
    np.testing.assert_array_equal(ours[:, :chosen], theirs[:, :chosen])
    np.testing.assert_allclose(ours[:, chosen:], theirs[:, chosen:], rtol=1e-5, atol=1e-7)


@settings(max_examples=40, deadline=None)
@given(routings(), st.integers(1, 300), st.integers(0, 1000))
def test_experts_may_be_given_and_not_chosen(routing: Routing, rows: int, seed: int) -> None:
    """The ids come from a table of tokens; an expert may even be named twice."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, routing.num_experts, (rows, routing.top_k)).astype(np.float32)
    scores = 2 * normal(rng, rows, routing.num_experts + routing.shared_gate)
    chosen = routing.top_k + routing.shared
    found = []
    for backend in (native(), REFERENCE, TorchBackend(1)):
        table = backend.matrix([ids], "float32")

        def op(g: Any, x: Any, table: Any = table) -> Any:
            return g(Route(x, routing, ids=g(Embed(table))))

        found.append(apply_rows(backend, scores, op, 2 * chosen))
    for routes in found:
        np.testing.assert_array_equal(routes[:, : routing.top_k], ids)
        np.testing.assert_allclose(routes[:, chosen:], found[1][:, chosen:], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rows", [1, 50])
def test_an_expert_named_twice_counts_twice(rows: int) -> None:
    x = normal(np.random.default_rng(1), rows, 40)
    ids = np.random.default_rng(2).integers(0, 6, (rows, 3)).astype(np.float32)
    ids[0] = 4
    ours, theirs = (
        apply_rows(backend, x, mixture(backend, "float32", "silu", False, ids=ids), 40)
        for backend in (native(), REFERENCE)
    )
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)


def mixture(
    backend: Backend,
    dtype: WeightType,
    activation: Activation,
    biases: bool,
    width: int = 40,
    inner: int = 24,
    shared_inner: int = 33,
    ids: Any = None,
) -> Any:
    """Router and experts as one operation on rows of `width`; the last expert, shared, is of another size.

    With `ids` [rows, 3] these are each row's experts.
    """
    rng = np.random.default_rng(5)
    routing = Routing(6, 3, renormalize=True, shared=True, shared_gate=True)

    def weight(rows: int, columns: int) -> Any:
        values = normal(rng, rows, columns) / np.float32(np.sqrt(columns))
        return dtype.layout.quantize(values) if isinstance(dtype, Quantized) else values

    def expert(size: int, limit: float = 0.0) -> Expert:
        up = backend.gated_matrix(weight(size, width), weight(size, width), dtype)
        bias = (normal(rng, 2 * size), normal(rng, width)) if biases else (None, None)
        return Expert(up, bias[0], backend.matrix([weight(width, size)], dtype), bias[1], limit)

    router = backend.matrix([3 * normal(rng, 7, width) / np.float32(np.sqrt(width))], "float32")
    experts = [expert(inner) for _ in range(6)] + [expert(shared_inner, 0.3)]

    table = None if ids is None else backend.matrix([ids], "float32")

    def op(g: Any, x: Any) -> Any:
        given = None if table is None else g(Embed(table))
        return g(RunExperts(x, g(Route(g(Linear(x, router)), routing, ids=given)), experts, activation))

    return op


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("activation", "biases"), [("silu", False), ("clamped_swiglu", True), ("clamped_silu", True)]
)
def test_experts_equal_the_reference(
    isa: str, dtype: FloatDtype, activation: Activation, biases: bool
) -> None:
    x = normal(np.random.default_rng(1), 50, 40)
    ours, theirs = (
        apply_rows(backend, x, mixture(backend, dtype, activation, biases), 40)
        for backend in (native(isa), REFERENCE)
    )
    rounded = dtype == "bfloat16" and rounds_activations(isa)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=5e-2 if rounded else 2e-5)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(ISAS), st.sampled_from(WEIGHTS), st.integers(2, 130), st.data())
def test_a_token_alone_has_the_bits_it_has_in_any_company(
    isa: str, dtype: WeightType, rows: int, data: st.DataObject
) -> None:
    """Up to 14 tokens all experts run together, then one after the other."""
    sizes = (64, 64, 128) if isinstance(dtype, Quantized) else (40, 24, 33)
    x = normal(np.random.default_rng(rows), rows, sizes[0])

    def run(backend: Backend, rows: Any) -> Any:
        return apply_rows(backend, rows, mixture(backend, dtype, "silu", True, *sizes), sizes[0])

    whole = run(native(isa), x)
    some = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=5))
    np.testing.assert_array_equal(run(native(isa, data.draw(st.sampled_from([1, 3]))), x[some]), whole[some])


@pytest.mark.parametrize("isa", ISAS)
def test_small_operations_equal_the_reference(isa: str) -> None:
    rng = np.random.default_rng(3)
    x, table = normal(rng, 33, 40), normal(rng, 40, 40)
    heads, biases = [normal(rng, 6, 10) for _ in range(4)], normal(rng, 24)

    def run(backend: Backend) -> list[Any]:
        positions = backend.matrix([table], "float32")
        weights = [backend.matrix([head], "float32") for head in heads]
        return [
            apply_rows(backend, x, lambda g, v: g(Add(v, g(EmbedPositions(positions, 2)), 0.3)), 40),
            apply_rows(backend, x, lambda g, v: g(Scale(v, 1.7, 2.5)), 40),
            apply_rows(backend, x, lambda g, v: g(Scale(v, 0.3)), 40),
            apply_rows(backend, x, lambda g, v: g(HeadLinear(v, weights)), 24),
            apply_rows(backend, x, lambda g, v: g(HeadLinear(v, weights, biases, "sigmoid")), 24),
        ]

    for ours, theirs in zip(run(native(isa)), run(REFERENCE), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=2e-6)


def latent(backend: Backend, rows: int, kv_dtype: FloatDtype) -> Any:
    """Latent attention over one step of `rows` tokens: [rows, N value_dim]."""
    heads, rank, rotary = 3, 20, 6
    rng = np.random.default_rng(9)
    x = backend.matrix([normal(rng, rows, 16)], "float32")
    widths = (rank + rotary, heads * rank, heads * rotary)
    kv, q, turned = (backend.matrix([0.4 * normal(rng, width, 16)], "float32") for width in widths)
    head = backend.matrix([np.ones((rows, heads * rank), np.float32)], "float32")
    norm = Norm("rms", 1 + 0.1 * normal(rng, rank), None, 1e-6)
    rope = Rope((50.0 ** -(np.arange(3) / 3)).astype(np.float32))

    def hidden(g: Any) -> Any:
        row = g(Embed(x))
        kept = g(
            StoreLatent(
                g(Linear(row, kv)),
                g(Linear(row, q)),
                g(Linear(row, turned)),
                0,
                g(RopeAngles(rope)),
                norm,
            )
        )
        return g(SelectRows(g(Attend(kept, 0, heads, Attention(0.2)))))

    graph = record(hidden, lambda g, h: g(Linear(h, head)), rows, heads * rank)
    spec = KVSpec(1, 1, rank + rotary, kv_dtype, value_dim=rank)
    executable = backend.compile(graph, backend.kv_cache(spec, rows, 1), Limits(rows, 1, rows))
    executable.run(rows_step(rows))
    return executable.hidden().copy()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_latent_attention_equals_the_reference(isa: str, kv_dtype: FloatDtype) -> None:
    ours, theirs = latent(native(isa), 70, kv_dtype), latent(REFERENCE, 70, kv_dtype)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 if kv_dtype == "float32" else 1e-2)
