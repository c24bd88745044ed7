"""The recorded plan: whole steps equal the reference, memory is planned, bad steps are refused, nothing crashes."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from quire import _native
from quire.devices.cpu.backend import NativeBackend
from quire.devices.cpu.machine import cgroup_cores, usable_threads
from quire.devices.graph import Graph, record
from quire.devices.host import HostLogits
from quire.devices.kv import FP8_MOST
from quire.devices.ops import (
    Attend,
    Embed,
    GatedLinear,
    Linear,
    Normalize,
    RopeAngles,
    Scale,
    SelectRows,
    StoreKV,
)
from quire.devices.protocol import (
    Arithmetic,
    Attention,
    Backend,
    FloatDtype,
    KVDtype,
    KVSpec,
    Limits,
    ModelInput,
    Norm,
    Rope,
    WeightType,
)
from quire.devices.reference.backend import ReferenceBackend
from quire.devices.reference.cache import KEPT
from quire.errors import EngineError
from quire.weights.layouts import Int4, Int8
from quire.weights.schemes import Quantized
from tests.devices.native_cases import ISAS, KV, apply_rows, int32, linear, native, normal, rows_step

D, N, G, H, F, V, LAYERS = 40, 4, 2, 12, 56, 77, 2


def model(
    backend: Backend, dtype: WeightType = "float32", kv_dtype: KVDtype = "float32", parallel: bool = False
) -> tuple[Graph, KVSpec]:
    """A small decoder of this file's own: every op, biases, both norms, partial rotation, a tied head.

    `parallel`: attention and MLP read one norm, so that the last layer's is read by all tokens and by few.
    """
    rng = np.random.default_rng(0)

    def weight(rows: int, columns: int) -> Any:
        return normal(rng, rows, columns) / np.float32(np.sqrt(columns))

    def norm(width: int, kind: Any = "rms") -> Norm:
        bias = 0.1 * normal(rng, width) if kind == "layer" else None
        return Norm(kind, 1 + 0.1 * normal(rng, width), bias, 1e-6)

    embedding, final = backend.matrix([weight(V, D)], dtype), norm(D, "layer")
    layers = [
        {
            "norm": norm(D),
            "qkv": backend.matrix([weight(N * H, D), weight(G * H, D), weight(G * H, D)], dtype),
            "bias": normal(rng, (N + 2 * G) * H),
            "q_norm": norm(H),
            "k_norm": norm(H, "layer"),
            "out": backend.matrix([weight(D, N * H)], dtype),
            "mlp_norm": norm(D, "layer"),
            "gate_up": backend.gated_matrix(weight(F, D), weight(F, D), dtype),
            "down": backend.matrix([weight(D, F)], dtype),
        }
        for _ in range(LAYERS)
    ]
    rope = Rope((100.0 ** -(np.arange(4) / 4)).astype(np.float32), 1.1)

    def hidden(g: Any) -> Any:
        x, angles = g(Embed(embedding, 2.0)), g(RopeAngles(rope))
        for index, layer in enumerate(layers):
            normed = g(Normalize(x, layer["norm"]))
            qkv = g(Linear(normed, layer["qkv"], layer["bias"]))
            q = g(StoreKV(qkv, index, N, angles, layer["q_norm"], layer["k_norm"]))
            heads = g(Attend(q, index, N, Attention(H**-0.5, 5 if index else None)))
            x = g(Linear(heads, layer["out"], residual=x))
            normed = normed if parallel else g(Normalize(x, layer["mlp_norm"]))
            inner = g(GatedLinear(normed, layer["gate_up"], "gelu_tanh"))
            x = g(Linear(inner, layer["down"], residual=x))
        return g(Normalize(g(SelectRows(x)), final))

    graph = record(hidden, lambda g, h: g(Linear(h, embedding)), V, D)
    return graph, KVSpec(LAYERS, G, H, kv_dtype)


def step(rng: np.random.Generator, lengths: list[tuple[int, int]], table: Any, rows: list[int]) -> ModelInput:
    """Sequences of (new tokens, kv_len); sequence b has slot b."""
    cu = np.concatenate([[0], np.cumsum([n for n, _ in lengths])]).astype(np.int32)
    positions = np.concatenate([np.arange(kv - n, kv) for n, kv in lengths]).astype(np.int32)
    return ModelInput(
        rng.integers(0, V, cu[-1]).astype(np.int32),
        positions,
        cu,
        int32(*(kv for _, kv in lengths)),
        np.arange(len(lengths), dtype=np.int32),
        table,
        int32(*rows),
    )


def three_steps(backend: Backend, dtype: FloatDtype, kv_dtype: KVDtype, poison: bool = False) -> list[Any]:
    """A prefill of two sequences, a step of both, a block copy and a step that reads the copy: all logits."""
    graph, spec = model(backend, dtype, kv_dtype)
    cache = backend.kv_cache(spec, 24, 4)
    executable: Any = backend.compile(graph, cache, Limits(40, 3, 4))
    rng = np.random.default_rng(1)
    table = rng.permutation(24).astype(np.int32).reshape(3, 8)
    results = []
    for index, (lengths, rows) in enumerate(
        [([(11, 11), (7, 7)], [10, 17, 3]), ([(1, 12), (9, 16)], [0, 9]), ([(1, 13), (1, 17)], [1, 0])]
    ):
        if poison:
            executable._plan.poison()
        if index == 2:
            free = sorted(set(range(24)) - set(table[0].tolist()) - set(table[1].tolist()))[0]
            cache.copy_blocks([(int(table[0, 0]), free)])
            table[0, 0] = free
        results.append(executable.run(step(rng, lengths, table, rows)).numpy().copy())
        results.append(executable.hidden().copy())
    return results


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "float16", "fp8_e4m3", "fp8_e5m2"])
def test_steps_equal_the_reference(isa: str, dtype: FloatDtype, kv_dtype: KVDtype) -> None:
    want = three_steps(ReferenceBackend(), dtype, kv_dtype)
    got = three_steps(native(isa), dtype, kv_dtype, poison=True)
    rounded = kv_dtype != "float32" or (dtype == "bfloat16" and "bf16" in isa)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=0.1 if rounded else 1e-4)
    for threads in (1, 3):
        other = three_steps(native(isa, threads), dtype, kv_dtype, poison=True)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(got, other, strict=True))


@pytest.mark.parametrize("parallel", [False, True])
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_rows_that_nobody_reads_change_no_logits(parallel: bool, data: st.DataObject) -> None:
    """A step that reads some rows, in any order, has the bits of one that reads all, and so has the step after it."""
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3), "tokens of sequences")
    total = sum(lengths)
    rows = data.draw(st.lists(st.integers(0, total - 1), max_size=8), "logit rows")
    graph, spec = model(native(), parallel=parallel)
    table = int32(0, 1, 2, 3, 0, 4, 5, 6, 0, 7, 8, 9).reshape(3, 4)  # all begin with one block

    def steps(rows: list[int]) -> list[Any]:
        executable: Any = native().compile(graph, native().kv_cache(spec, 10, 4), Limits(40, 3, 40))
        rng, results = np.random.default_rng(3), []
        before, prompts = [(4, 4)], [(n, 4 + n) for n in lengths]
        after = [(1, 5 + n) for n in lengths]
        for sequences, read in ((before, []), (prompts, rows), (after, list(range(len(after))))):
            executable._plan.poison()
            results.append(executable.run(step(rng, sequences, table, read)).numpy().copy())
        return results

    got, want = steps(rows), steps(list(range(total)))
    assert got[1].tobytes() == want[1][rows].tobytes()
    assert got[2].tobytes() == want[2].tobytes()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "float16", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("head_dim", [20, 48])
def test_keys_are_the_same_stored_together_and_one_by_one(isa: str, kv_dtype: KVDtype, head_dim: int) -> None:
    backend, count, heads = native(isa), 41, 3
    qkv = backend.matrix([normal(np.random.default_rng(5), count, 3 * heads * head_dim)], "float32")
    head = backend.matrix([np.ones((8, heads * head_dim), np.float32)], "float32")

    def attend(g: Any) -> Any:
        q = g(StoreKV(g(Embed(qkv)), 0, heads, None, None, None))
        return g(SelectRows(g(Attend(q, 0, heads, Attention(head_dim**-0.5)))))

    graph = record(attend, lambda g, h: g(Linear(h, head)), 8, heads * head_dim)

    def last_row(chunk: int) -> bytes:
        kv = backend.kv_cache(KVSpec(1, heads, head_dim, kv_dtype), 3, 16)
        executable: Any = backend.compile(graph, kv, Limits(count, 1, 1))
        table = int32(2, 0, 1).reshape(1, -1)
        for start in range(0, count, chunk):
            end = min(start + chunk, count)
            tokens = np.arange(start, end, dtype=np.int32)
            rows = int32(end - start - 1)
            executable.run(
                ModelInput(tokens, tokens, int32(0, end - start), int32(end), int32(0), table, rows)
            )
        hidden: bytes = executable.hidden().tobytes()
        return hidden

    assert last_row(count) == last_row(1) == last_row(7)


def attention_of(
    backend: Backend,
    qkv: Any,
    heads: int,
    groups: int,
    head_dim: int,
    kv_dtype: KVDtype,
    block_size: int,
) -> Any:
    """Attention of one sequence, rows [queries, keys, values]; native backends run its last token alone as well."""
    count = len(qkv)
    table = backend.matrix([qkv], "float32")
    head = backend.matrix([qkv[:, : heads * head_dim]], "float32")

    def hidden(g: Any) -> Any:
        q = g(StoreKV(g(Embed(table)), 0, heads, None, None, None))
        return g(SelectRows(g(Attend(q, 0, heads, Attention(head_dim**-0.5)))))

    graph = record(hidden, lambda g, h: g(Linear(h, head)), count, heads * head_dim)
    blocks = -(-count // block_size)
    kv = backend.kv_cache(KVSpec(1, groups, head_dim, kv_dtype), blocks, block_size)
    executable = backend.compile(graph, kv, Limits(count, 1, 1))
    tokens, block_ids = np.arange(count, dtype=np.int32), np.arange(blocks, dtype=np.int32)[::-1].copy()

    def run(new: Any) -> Any:
        rows = np.arange(len(new), dtype=np.int32)
        executable.run(
            ModelInput(new, new, int32(0, len(new)), int32(count), int32(0), block_ids.reshape(1, -1), rows)
        )
        return executable.hidden().copy()

    whole = run(tokens)
    if isinstance(backend, NativeBackend):
        assert run(tokens[-1:]).tobytes() == whole[-1].tobytes()
    return whole


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size"),
    [(4, 64, 16), (2, 48, 32), (4, 20, 4), (4, 128, 8), (6, 64, 16), (14, 64, 16), (14, 80, 16)],
)
def test_int8_attention_is_as_exact_as_its_cache(
    isa: str, heads: int, head_dim: int, block_size: int
) -> None:
    """Of queries and weights 16 bits are kept: what that loses is little beside what int8 keys and values lose.

    The last token by itself, whose rows are as many as a kv head has query heads, has the same bits.
    """
    count, groups = 150, 2
    rng = np.random.default_rng(7)
    values = normal(rng, count, (heads + 2 * groups) * head_dim)
    values[:, : heads * head_dim] *= 8  # some weights are near 1, most near 0

    def attend(backend: Backend, kv_dtype: KVDtype) -> Any:
        return attention_of(backend, values, heads, groups, head_dim, kv_dtype, block_size)

    got, want = attend(native(isa), "int8"), attend(ReferenceBackend(), "int8")
    lost = np.abs(want - attend(ReferenceBackend(), "float32")).max()
    assert np.abs(got - want).max() < lost / 100


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("head_dim", [256, 576, 1024])
def test_int8_scores_of_wide_heads_stay_in_range(isa: str, head_dim: int) -> None:
    """Every byte at its greatest, and of one sign: sums are as large as they get."""
    rng = np.random.default_rng(3)
    signs = rng.choice(np.float32([-1, 1]), 40)
    rows = np.ones((40, 3, head_dim), np.float32)
    rows[:, 0] *= 1 / head_dim**0.5  # scores of -1 and 1
    rows[:, 1] *= signs[:, None]
    rows[:, 2] = normal(rng, 40, head_dim)
    qkv = rows.reshape(40, -1)
    got, want = (attention_of(b, qkv, 1, 1, head_dim, "int8", 8) for b in (native(isa), ReferenceBackend()))
    np.testing.assert_allclose(got, want, atol=2e-3)


@pytest.mark.parametrize("isa", ISAS)
@settings(deadline=None, max_examples=30)
@given(
    rows=st.integers(1, 60),
    width=st.integers(1, 300),
    kind=st.sampled_from(["rms", "layer"]),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_norm_equals_the_reference(
    isa: str, rows: int, width: int, kind: Any, with_bias: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x = 3 * normal(rng, rows, width) + 1
    norm = Norm(kind, normal(rng, width), normal(rng, width) if with_bias else None, 1e-5)
    got, want = (
        apply_rows(b, x, lambda g, t: g(Normalize(t, norm)), width) for b in (native(isa), ReferenceBackend())
    )
    # Of a row that is all mean, float32 keeps what rounding leaves; eps alone bounds it.
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-4 if kind == "layer" and width < 3 else 2e-5)
    alone = apply_rows(native(isa), x[-1:], lambda g, t: g(Normalize(t, norm)), width)
    assert alone.tobytes() == got[-1:].tobytes()


@pytest.mark.parametrize("isa", ISAS)
@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 120),
    width=st.integers(1, 400),
    dtype=st.sampled_from(
        [
            "float32",
            "bfloat16",
            Quantized(Int8()),
            Quantized(Int8(), "float"),
            Quantized(Int4(32)),
            Quantized(Int4(32, False), "float"),
        ]
    ),
    kind=st.sampled_from(["rms", "layer"]),
    seed=st.integers(0, 2**31),
)
def test_a_norm_within_a_product_equals_one_before_it(
    isa: str, rows: int, width: int, dtype: WeightType, kind: Any, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x, w, bias = 3 * normal(rng, rows, width) + 1, normal(rng, 40, width), normal(rng, 40)
    norm = Norm(kind, normal(rng, width), normal(rng, width) if seed % 2 else None, 1e-5)
    backend = native(isa)
    weight = backend.matrix([w], dtype)
    within = apply_rows(backend, x, lambda g, t: g(Linear(g(Normalize(t, norm)), weight, bias)), 40)
    normed = apply_rows(backend, x, lambda g, t: g(Normalize(t, norm)), width)
    assert within.tobytes() == linear(backend, normed, w, dtype, bias=bias).tobytes()


def test_a_norm_that_one_product_reads_takes_no_memory() -> None:
    backend, norm = native(), Norm("rms", np.ones(64, np.float32), None, 1e-5)
    weight = backend.matrix([np.ones((64, 64), np.float32)], "bfloat16")

    def size(op: Any) -> int:
        graph = record(
            lambda g: g(SelectRows(op(g, g(Embed(weight))))),
            lambda g, h: g(Linear(h, weight)),
            64,
            64,
        )
        return backend.workspace_bytes(graph, KV, Limits(500, 1, 1))

    def once(g: Any, t: Any) -> Any:
        return g(Linear(g(Normalize(t, norm)), weight, residual=t))

    def spaced(g: Any, t: Any) -> Any:
        return g(Linear(g(Scale(g(Normalize(t, norm)), 1.0)), weight, residual=t))

    assert size(once) == size(lambda g, t: g(Linear(t, weight, residual=t))) < size(spaced)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embedding_reads_the_packed_rows(isa: str, dtype: FloatDtype) -> None:
    rng = np.random.default_rng(3)
    for rows, width in ((1, 1), (16, 33), (50, 64), (35, 7)):
        values = normal(rng, rows, width)
        matrix = native(isa).matrix([values], dtype)
        graph = record(
            lambda g, m=matrix: g(SelectRows(g(Embed(m, 1.5)))),
            lambda g, h, m=matrix: g(Linear(h, m)),
            rows,
            width,
        )
        executable = native(isa).compile(graph, native(isa).kv_cache(KV, rows, 1), Limits(rows, 1, 1))
        executable.run(rows_step(rows))
        np.testing.assert_array_equal(executable.hidden(), matrix.dequantize() * np.float32(1.5))


@pytest.mark.parametrize("isa", ISAS)
def test_rope_angles_are_float32_accurate_at_any_position(isa: str) -> None:
    backend = native(isa)
    frequencies = (500000.0 ** -(np.arange(37) / 37)).astype(np.float32)
    head = backend.matrix([np.ones((8, 74), np.float32)], "float32")
    graph = record(
        lambda g: g(SelectRows(g(RopeAngles(Rope(frequencies, 0.7))))),
        lambda g, h: g(Linear(h, head)),
        8,
        74,
    )
    # Only positions matter here: an embedding op is not needed, and neither are real blocks.
    table = np.zeros((1, 200_000), np.int32)
    executable = backend.compile(graph, backend.kv_cache(KV, 1, 1), Limits(9, 1, 1))
    for last in (9, 4000, 200_000):
        positions = np.arange(last - 9, last, dtype=np.int32)
        rows = np.arange(9, dtype=np.int32)
        executable.run(ModelInput(rows * 0, positions, int32(0, 9), int32(last), int32(0), table, rows))
        angle = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
        want = 0.7 * np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
        np.testing.assert_allclose(executable.hidden(), want, rtol=0, atol=1e-6)


def ready(
    limits: Limits = Limits(16, 3, 2),  # noqa: B008 (frozen)
    dtype: WeightType = "float32",
) -> tuple[Any, ModelInput]:
    graph, spec = model(native(), dtype)
    executable = native().compile(graph, native().kv_cache(spec, 12, 4), limits)
    table = np.arange(12, dtype=np.int32).reshape(3, 4)
    return executable, step(np.random.default_rng(2), [(5, 9), (1, 3)], table, [5, 0, 2])


def changed(array: Any, index: Any, value: int) -> Any:
    out = array.copy()
    out[index] = value
    return out


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("tokens_T", lambda a: changed(a, 2, V), "token id"),
        ("tokens_T", lambda a: changed(a, 0, -1), "token id"),
        ("tokens_T", lambda a: a[:-1], "disagree"),
        ("tokens_T", lambda a: a.astype(np.int64), "incompatible"),
        ("tokens_T", lambda a: np.repeat(a, 2)[::2], "incompatible"),
        ("positions_T", lambda a: changed(a, 1, 7), "positions"),
        ("positions_T", lambda a: changed(a, 5, -3), "positions"),
        ("cu_q_B1", lambda a: changed(a, 0, 1), "cu_q"),
        ("cu_q_B1", lambda a: changed(a, 1, 6), "cu_q"),
        ("cu_q_B1", lambda a: changed(a, 1, 99), "cu_q"),
        ("cu_q_B1", lambda a: changed(a, 1, -5), "cu_q"),
        ("cu_q_B1", lambda a: changed(a, 2, 7), "cu_q"),
        ("cu_q_B1", lambda a: a[:-1], "disagree"),
        ("kv_len_B", lambda a: changed(a, 0, 4), "kv_len"),
        ("kv_len_B", lambda a: changed(a, 0, -(2**31)), "kv_len"),
        ("kv_len_B", lambda a: changed(a, 0, 2**31 - 1), "positions"),
        ("slots_B", lambda a: changed(a, 0, 3), "slot"),
        ("slots_B", lambda a: changed(a, 0, -1), "slot"),
        ("block_table_SM", lambda a: changed(a, (0, 2), 12), "block id"),
        ("block_table_SM", lambda a: changed(a, (0, 0), -1), "block id"),
        ("block_table_SM", lambda a: np.ascontiguousarray(a[:, :2]), "does not cover"),
        ("logit_rows_L", lambda a: changed(a, 0, 6), "logit row"),
        ("logit_rows_L", lambda a: changed(a, 0, -1), "logit row"),
        ("logit_rows_L", lambda a: np.zeros(17, np.int32), "rows of logits"),
    ],
)
def test_a_bad_step_is_refused_and_the_next_runs(field: str, change: Any, message: str) -> None:
    executable, inputs = ready()
    before = executable.run(inputs).numpy().copy()
    with pytest.raises(EngineError, match=message):
        executable.run(replace(inputs, **{field: change(getattr(inputs, field))}))
    assert executable.run(inputs).numpy().tobytes() == before.tobytes()


def test_a_block_that_a_sequence_does_not_use_may_be_anything() -> None:
    executable, inputs = ready()
    before = executable.run(inputs).numpy().copy()
    table = changed(inputs.block_table_SM, (0, 3), -1)
    assert executable.run(replace(inputs, block_table_SM=table)).numpy().tobytes() == before.tobytes()


@pytest.mark.parametrize("limits", [Limits(5, 3, 2), Limits(16, 1, 2)])
def test_a_step_over_the_limits_is_refused(limits: Limits) -> None:
    executable, inputs = ready(limits)
    with pytest.raises(EngineError, match="limits"):
        executable.run(inputs)


def test_logits_beyond_the_first_rows_come_from_the_last_run() -> None:
    executable, inputs = ready(Limits(16, 3, 2))
    rows = int32(3, 0, 5, 1, 4)
    whole, _ = ready(Limits(16, 3, 8))
    want = whole.run(replace(inputs, logit_rows_L=rows)).numpy().copy()
    first = executable.run(replace(inputs, logit_rows_L=rows)).numpy()
    assert first.shape == (2, V)
    assert first.tobytes() == want[:2].tobytes()
    assert executable.logits(2, 4).numpy().tobytes() == want[2:4].tobytes()
    assert executable.logits(4, 5).numpy().tobytes() == want[4:].tobytes()
    assert executable.logits(3, 3).numpy().shape == (0, V)
    assert executable.hidden().shape == (5, D)
    for start, stop in ((-1, 1), (4, 6), (3, 2), (0, 3)):
        with pytest.raises(EngineError, match="logit rows"):
            executable.logits(start, stop)


@pytest.mark.parametrize("isa", ISAS)
@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 90),
    vocab=st.integers(1, 700) | st.sampled_from([2048, 4096, 5000]),
    dtype=st.sampled_from(["float32", "bfloat16", Quantized(Int8()), Quantized(Int4(32))]),
    special=st.sampled_from([None, np.nan, np.inf, -np.inf, 0.0]),
    seed=st.integers(0, 2**31),
)
def test_the_best_of_each_row_is_known(
    isa: str, rows: int, vocab: int, dtype: WeightType, special: float | None, seed: int
) -> None:
    """The lowest id of equals; -1 where a logit is NaN or +inf, in pieces of the rows too."""
    rng = np.random.default_rng(seed)
    backend = native(isa, threads=1 + seed % 3)
    x, w = normal(rng, rows, 32), rng.integers(-2, 3, (vocab, 32)).astype(np.float32)
    if special is not None:
        x[rng.integers(rows)] = special
    table, weight = backend.matrix([x], "float32"), backend.matrix([w], dtype)
    graph = record(lambda g: g(SelectRows(g(Embed(table)))), lambda g, h: g(Linear(h, weight)), vocab, 32)
    at_once = max(1, rows // 2)
    executable = backend.compile(graph, backend.kv_cache(KV, rows, 1), Limits(rows, 1, at_once))
    logits = executable.run(rows_step(rows))
    for start in range(0, rows, at_once):
        stop = min(rows, start + at_once)
        logits = executable.logits(start, stop) if start else logits
        want = [int(row.argmax()) if (row < np.inf).all() else -1 for row in logits.numpy()]
        assert logits.best is not None
        assert logits.best.tolist() == want


def test_the_best_of_changed_logits_is_not_known() -> None:
    backend = native()
    table = backend.matrix([np.eye(8, dtype=np.float32)], "float32")
    graph = record(
        lambda g: g(SelectRows(g(Embed(table)))),
        lambda g, h: g(Scale(g(Linear(h, table)), -1.0)),
        8,
        8,
    )
    executable = backend.compile(graph, backend.kv_cache(KV, 8, 1), Limits(8, 1, 8))
    logits = executable.run(rows_step(8))
    assert isinstance(logits, HostLogits)
    assert logits.best is None


def test_a_step_without_logits_still_writes_its_keys() -> None:
    executable, inputs = ready()
    want = executable.run(inputs).numpy().copy()
    other, _ = ready()
    table = inputs.block_table_SM
    for start, stop in ((0, 3), (3, 5)):
        tokens, count = inputs.tokens_T[start:stop], stop - start
        length = int(inputs.positions_T[stop - 1]) + 1
        # Positions before the step's first were never written in either cache: both read the same zeros.
        other.run(
            ModelInput(
                tokens,
                inputs.positions_T[start:stop],
                int32(0, count),
                int32(length),
                int32(0),
                table,
                int32(),
            )
        )
    got = other.run(step(np.random.default_rng(2), [(5, 9), (1, 3)], table, [5, 0, 2])).numpy()
    assert got.tobytes() == want.tobytes()


def test_workspace_is_known_before_it_is_taken() -> None:
    graph, spec = model(native())
    sizes = [native().workspace_bytes(graph, spec, Limits(t, 4, 8)) for t in (1, 16, 64)]
    assert sizes == sorted(sizes)
    # Rows of 64 tokens: qkv, hidden and inner live at most; nothing like one buffer for each of the 20 ops.
    assert 4 * 64 * (N + 2 * G) * H < sizes[2] < 4 * 64 * 6 * (N + 2 * G) * H + 4 * 8 * V + 2**21
    # What attention keeps for each thread is large but the same for all: it hides nothing of what tokens take.
    assert sizes[2] - sizes[0] < 4 * 63 * 6 * (N + 2 * G) * H + 4 * 8 * V
    huge = native().workspace_bytes(graph, spec, Limits(1 << 24, 4, 8))
    assert huge > 1 << 33  # planned only: this much is not there


def test_views_outlive_the_executable() -> None:
    executable, inputs = ready()
    logits = executable.run(inputs).numpy()
    values = logits.copy()
    del executable
    assert logits.tobytes() == values.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", Quantized(Int8()), Quantized(Int4(32))])
def test_callers_take_turns_on_one_pool(dtype: WeightType) -> None:
    runs = [ready(dtype=dtype) for _ in range(4)]
    want = [executable.run(inputs).numpy().copy() for executable, inputs in runs]
    failures: list[int] = []

    def repeat(index: int) -> None:
        executable, inputs = runs[index]
        for _ in range(200):
            if executable.run(inputs).numpy().tobytes() != want[index].tobytes():
                failures.append(index)

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_runs_alone() -> None:
    backend = NativeBackend(3)
    x = normal(np.random.default_rng(0), 40, 64)
    weight = backend.matrix([x], "float32")
    want = apply_rows(backend, x, lambda g, t: g(Linear(t, weight)), 40)
    child = os.fork()
    if child == 0:
        got = apply_rows(backend, x, lambda g, t: g(Linear(t, weight)), 40)
        os._exit(0 if got.tobytes() == want.tobytes() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_graphs_that_do_not_fit_are_refused() -> None:
    backend = native()
    graph, spec = model(backend)
    limits = Limits(8, 2, 2)
    other = backend.kv_cache(replace(spec, head_dim=H + 1), 4, 4)
    with pytest.raises(ValueError, match="KV cache has another shape"):
        backend._record(graph, spec, limits).plan.bind(other.store)
    wrong = backend.matrix([np.ones((V, D + 1), np.float32)], "float32")
    rows = backend.matrix([np.ones((V, D), np.float32)], "float32")
    narrow = record(lambda g: g(SelectRows(g(Embed(rows)))), lambda g, h: g(Linear(h, wrong)), V, D)
    with pytest.raises(EngineError, match="columns"):
        backend.workspace_bytes(narrow, spec, limits)
    with pytest.raises(EngineError, match="logits"):
        backend.workspace_bytes(replace(graph, vocab_size=V + 1), spec, limits)
    all_rows = record(lambda g: g(Embed(rows)), lambda g, h: g(Linear(h, rows)), V, D)
    with pytest.raises(EngineError, match="select_rows"):
        backend.workspace_bytes(all_rows, spec, limits)
    with pytest.raises(EngineError, match="ReferenceMatrix"):
        backend.workspace_bytes(model(ReferenceBackend())[0], spec, limits)
    with pytest.raises(EngineError, match="ReferenceKVCache"):
        backend.compile(graph, ReferenceBackend().kv_cache(spec, 4, 4), limits)


def test_block_copies_are_checked_before_any_is_made() -> None:
    cache = native().kv_cache(KV, 4, 2)
    cache.copy_blocks([])
    cache.copy_blocks([(0, 3), (3, 1)])
    for copies in ([(0, 4)], [(-1, 0)]):
        with pytest.raises(EngineError, match="outside the cache"):
            cache.copy_blocks(copies)
    for sizes in ((0, 2), (4, 0)):
        with pytest.raises(EngineError, match="at least 1"):
            native().kv_cache(KV, *sizes)


def test_the_backend_names_what_it_runs_on() -> None:
    assert native("scalar", 1).name == "native scalar, 1 thread"
    assert native("auto", 2).name == f"native {ISAS[0]}, 2 threads"
    assert NativeBackend().threads == usable_threads() >= 1
    with pytest.raises(EngineError, match="choose one of"):
        NativeBackend(1, "sse9")
    with pytest.raises(EngineError, match="at least 1"):
        NativeBackend(0)


def test_free_memory_is_what_the_machine_has() -> None:
    assert 0 < native().free_memory() < 1 << 50


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("arithmetic", ["fp32", "bf16", "int8"])
def test_limits_are_measured_in_the_arithmetic_that_there_is(arithmetic: Arithmetic, isa: str) -> None:
    limits = native(isa).measure_limits(arithmetic)
    assert limits.arithmetic == ("fp32" if arithmetic == "bf16" and isa != "avx512_bf16" else arithmetic)
    assert limits.threads == 2
    assert 0.1 < limits.read_gbs < 1e4
    assert limits.peak_gflops > 0


def test_a_control_group_quota_bounds_the_threads(tmp_path: Any) -> None:
    assert cgroup_cores(tmp_path) > 1000
    for text, cores in (("150000 100000", 2), ("max 100000", 1 << 20), ("50000 100000", 1), ("?", 1 << 20)):
        (tmp_path / "cpu.max").write_text(text)
        assert cgroup_cores(tmp_path) == cores
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("300000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cgroup_cores(tmp_path) == 3
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert cgroup_cores(tmp_path) > 1000


def test_probes_give_plausible_limits() -> None:
    assert 1e8 < _native.measure_read_bandwidth(8 << 20, 2) < 1e13
    assert all(1e8 < _native.measure_peak("fp32", 1, isa) < 1e13 for isa in ("auto", *ISAS))
    assert _native.measure_peak("bf16", 1) >= 0
    assert _native.measure_peak("int8", 1) >= 0
    with pytest.raises(ValueError, match="fp32, bf16 and int8"):
        _native.measure_peak("fp8", 1)
    with pytest.raises(ValueError, match="at least one thread"):
        _native.measure_peak("fp32", 0)
    with pytest.raises(ValueError, match="at least one thread"):
        _native.measure_read_bandwidth(100, 1)


@pytest.mark.parametrize("kind", ["read", "fp32"])
def test_a_product_takes_turns_with_its_limit(kind: str) -> None:
    backend = native()
    weights = [
        backend.matrix([normal(np.random.default_rng(0), 64, 96)], "bfloat16").packed for _ in range(2)
    ]
    turns = _native.compare_linear(backend.isa, backend.pool, weights, 3, kind, 2)
    assert len(turns) == 2
    assert all(turn.seconds > 0 and 1e7 < turn.limit < 1e14 for turn in turns)
    with pytest.raises(ValueError, match="at least one weight"):
        _native.compare_linear(backend.isa, backend.pool, [], 3, kind, 2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", ["float16", "fp8_e4m3", "fp8_e5m2"])
def test_narrow_caches_round_to_the_nearest(isa: str, kv_dtype: KVDtype) -> None:
    """The output over one position is its value, as the cache holds it: to even where two are as near."""
    kept = KEPT[kv_dtype]
    held = np.arange(1 << (8 * np.dtype(kept).itemsize), dtype=f"u{np.dtype(kept).itemsize}").view(kept)
    numbers = np.sort(held.astype(np.float32)[np.isfinite(held.astype(np.float32))])
    middles = (numbers[1:] + numbers[:-1]) / 2
    sizes = [
        numbers,
        middles,
        np.nextafter(middles, np.float32(np.inf)),
        np.nextafter(middles, np.float32(-np.inf)),
    ]
    values = np.unique(np.concatenate([*sizes, [1e-9, 1e4, 1e9, -3e38]]).astype(np.float32))
    most = {"float16": np.inf, **FP8_MOST}[kv_dtype]
    with np.errstate(over="ignore"):
        wanted = np.clip(values, -most, most).astype(kept).astype(np.float32)
    finite = np.isfinite(wanted)
    values, wanted = values[finite], wanted[finite]
    values, wanted = (np.pad(v, (0, -len(v) % 64)).reshape(-1, 64) for v in (values, wanted))
    backend, rows = native(isa), len(values)
    qkv = backend.matrix([np.concatenate([np.zeros((rows, 128), np.float32), values], axis=1)], "float32")

    def attend(g: Any) -> Any:
        return g(
            SelectRows(g(Attend(g(StoreKV(g(Embed(qkv)), 0, 1, None, None, None)), 0, 1, Attention(1.0))))
        )

    head = backend.matrix([np.ones((8, 64), np.float32)], "float32")
    graph = record(attend, lambda g, h: g(Linear(h, head)), 8, 64, num_token_ids=rows)
    executable: Any = backend.compile(
        graph, backend.kv_cache(KVSpec(1, 1, 64, kv_dtype), 64, 4), Limits(64, 64, 64)
    )
    for start in range(0, rows, 64):
        tokens = np.arange(start, min(start + 64, rows), dtype=np.int32)
        count = len(tokens)
        each, ones = np.arange(count, dtype=np.int32), np.ones(count, np.int32)
        ends, table = np.arange(count + 1, dtype=np.int32), np.arange(count, dtype=np.int32).reshape(-1, 1)
        executable.run(ModelInput(tokens, 0 * each, ends, ones, each, table, each))
        np.testing.assert_array_equal(executable.hidden(), wanted[start : start + count])
