"""The reference backend against torch's plain functions: right, and each row alone."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from quire.devices.graph import Graph, record
from quire.devices.ops import (
    Attend,
    Embed,
    GatedLinear,
    Linear,
    Normalize,
    Op,
    RopeAngles,
    SelectRows,
    StoreKV,
)
from quire.devices.protocol import Attention, KVSpec, Limits, ModelInput, Norm, Rope
from quire.devices.reference.backend import FORMULAS, ReferenceBackend, ReferenceStep
from quire.devices.reference.cache import ReferenceKVCache
from quire.devices.step import StepAdapters
from quire.errors import EngineError

BACKEND = ReferenceBackend()
TORCH_ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def normal(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def step(
    lengths: list[tuple[int, int]], block_size: int, rows: list[int] | None = None, seed: int = 0
) -> ModelInput:
    """A step of sequences (new tokens, kv_len), each with its own scattered blocks and a shuffled slot."""
    rng = np.random.default_rng(seed)
    width = max(-(-kv // block_size) for _, kv in lengths)
    table = rng.permutation(len(lengths) * width).astype(np.int32).reshape(len(lengths), width)
    cu = np.concatenate([[0], np.cumsum([n for n, _ in lengths])])
    return ModelInput(
        tokens_T=rng.integers(0, 11, cu[-1]).astype(np.int32),
        positions_T=np.concatenate([np.arange(kv - n, kv) for n, kv in lengths]).astype(np.int32),
        cu_q_B1=cu.astype(np.int32),
        kv_len_B=np.array([kv for _, kv in lengths], np.int32),
        slots_B=rng.permutation(len(lengths)).astype(np.int32),
        block_table_SM=table,
        logit_rows_L=np.array(list(range(cu[-1])) if rows is None else rows, np.int32),
    )


def compute(op: Op[Any], inputs: ModelInput, kv: ReferenceKVCache | None = None) -> Any:
    """The result of one operation, whose operands are arrays."""
    kv = kv or BACKEND.kv_cache(KVSpec(1, 1, 4, "float32"), 4, 4)
    return FORMULAS[type(op)](ReferenceStep(inputs, kv, StepAdapters({}, None)), op)


@pytest.mark.parametrize("activation", [None, *TORCH_ACTIVATIONS])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linear_with_bias_activation_and_residual(activation: Any, dtype: Any) -> None:
    x, w, bias, residual = 3 * normal(0, 5, 7), normal(1, 6, 7), normal(2, 6), normal(3, 5, 6)
    matrix = BACKEND.matrix([w[:2], w[2:]], dtype)
    rounded = w.astype(ml_dtypes.bfloat16).astype(np.float32) if dtype == "bfloat16" else w
    np.testing.assert_array_equal(matrix.dequantize(), rounded)
    assert matrix.shape == (6, 7)
    y = torch.from_numpy(x).double() @ torch.from_numpy(rounded).double().T + torch.from_numpy(bias)
    y = TORCH_ACTIVATIONS[activation](y) if activation else y
    got = compute(Linear(x, matrix, bias, activation, residual), step([(5, 5)], 8))
    np.testing.assert_allclose(got, y.numpy() + residual, atol=1e-6)
    assert got.dtype == np.float32


@pytest.mark.parametrize("with_bias", [False, True])
def test_gated_linear_is_activated_gate_times_up(with_bias: bool) -> None:
    x, gate, up = normal(0, 5, 7), normal(1, 6, 7), normal(2, 6, 7)
    bias = normal(3, 12) if with_bias else None
    gate_y, up_y = x @ gate.T, x @ up.T
    if bias is not None:
        gate_y, up_y = gate_y + bias[:6], up_y + bias[6:]
    expected = torch.nn.functional.silu(torch.from_numpy(gate_y)).numpy() * up_y
    matrix = BACKEND.gated_matrix(gate, up, "float32")
    assert matrix.shape == (12, 7)
    got = compute(GatedLinear(x, matrix, "silu", bias), step([(5, 5)], 8))
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_norms() -> None:
    x, weight, bias = normal(0, 4, 9), normal(1, 9), normal(2, 9)
    t = torch.from_numpy
    rms = torch.nn.functional.rms_norm(t(x), (9,), t(weight), 1e-5).numpy()
    layer = torch.nn.functional.layer_norm(t(x), (9,), t(weight), t(bias), 1e-5).numpy()
    inputs = step([(4, 4)], 8)
    np.testing.assert_allclose(compute(Normalize(x, Norm("rms", weight, None, 1e-5)), inputs), rms, atol=1e-6)
    np.testing.assert_allclose(
        compute(Normalize(x, Norm("layer", weight, bias, 1e-5)), inputs), layer, atol=1e-6
    )
    parts = torch.nn.functional.group_norm(t(x), 3, t(weight), t(bias), 1e-5).numpy()
    got = compute(Normalize(x, Norm("layer", weight, bias, 1e-5), groups=3), inputs)
    np.testing.assert_allclose(got, parts, atol=1e-6)


def test_embed_takes_the_rows_of_the_tokens_and_scales() -> None:
    table, inputs = normal(0, 11, 5), step([(3, 3), (2, 9)], 4)
    got = compute(Embed(BACKEND.matrix([table], "float32"), 2.0), inputs)
    np.testing.assert_array_equal(got, table[inputs.tokens_T] * 2)


def attend_with_torch(qkv: Any, heads: int, kv: Any, angles: Any, window: int | None, scale: float) -> Any:
    """A whole sequence at once: rope as complex multiplication, softmax(q k) v under an explicit mask."""
    total, half = len(qkv), angles.shape[1]
    x = torch.from_numpy(qkv).double().reshape(total, heads + 2 * kv.num_kv_heads, kv.head_dim)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
    turned = torch.cat([pairs.real, pairs.imag, x[..., 2 * half :]], dim=-1)
    q, k = turned[:, :heads], turned[:, heads : heads + kv.num_kv_heads]
    v = x[:, heads + kv.num_kv_heads :]
    repeat = heads // kv.num_kv_heads
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    place = torch.arange(total)
    allowed = place[None, :] <= place[:, None]
    if window is not None:
        allowed &= place[None, :] > place[:, None] - window
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).reshape(total, heads * kv.head_dim).numpy()


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=4),
    st.sampled_from([1, 2, 3, 16]),
    st.sampled_from([None, 1, 4, 100]),
    st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    st.sampled_from([4, 8]),
)
def test_rope_store_and_attention_equal_torch(
    lengths: list[tuple[int, int]], block: int, window: int | None, heads: tuple[int, int], rotary: int
) -> None:
    """Each sequence comes in two steps (the second of `new` tokens) over scattered blocks."""
    num_heads, groups = heads
    spec = KVSpec(2, groups, 8, "float32")
    rope = Rope(np.array([1.0, 0.3, 0.1, 0.02], np.float32)[: rotary // 2])
    totals = [new + old for new, old in lengths]
    qkv = [normal(i, total, (num_heads + 2 * groups) * 8) for i, total in enumerate(totals)]
    second = step([(new, total) for (new, _), total in zip(lengths, totals, strict=True)], block)
    kv = BACKEND.kv_cache(spec, second.block_table_SM.size, block)

    def run(inputs: ModelInput, x: Any) -> Any:
        angles = compute(RopeAngles(rope), inputs, kv)
        q = compute(StoreKV(x, 1, num_heads, angles), inputs, kv)
        return compute(Attend(q, 1, num_heads, Attention(0.4, window)), inputs, kv)

    for b, (_, old) in enumerate(lengths):
        if old:
            first = replace(
                step([(old, old)], block),
                slots_B=second.slots_B[b : b + 1],
                block_table_SM=second.block_table_SM,
            )
            run(first, qkv[b][:old])
    got = run(second, np.concatenate([x[old:] for x, (_, old) in zip(qkv, lengths, strict=True)]))
    expected = []
    for x, (_, old) in zip(qkv, lengths, strict=True):
        angles = torch.outer(torch.arange(len(x)).double(), torch.from_numpy(rope.inv_freq).double())
        expected.append(attend_with_torch(x, num_heads, spec, angles, window, 0.4)[old:])
    np.testing.assert_allclose(got, np.concatenate(expected), atol=2e-5)


def test_store_kv_norms_each_head_before_rope_and_leaves_values_alone() -> None:
    inputs, spec = step([(3, 3)], 4), KVSpec(1, 1, 4, "bfloat16")
    kv, qkv = BACKEND.kv_cache(spec, 1, 4), normal(0, 3, 16)
    q_norm, k_norm = Norm("rms", normal(1, 4), None, 1e-6), Norm("rms", normal(2, 4), None, 1e-6)
    q = compute(StoreKV(qkv, 0, 2, None, q_norm, k_norm), inputs, kv)
    t = torch.from_numpy(qkv).reshape(3, 4, 4)
    expected_q = torch.nn.functional.rms_norm(t[:, :2], (4,), torch.from_numpy(q_norm.weight), 1e-6)
    expected_k = torch.nn.functional.rms_norm(t[:, 2], (4,), torch.from_numpy(k_norm.weight), 1e-6)
    np.testing.assert_allclose(q.reshape(3, 2, 4), expected_q, atol=1e-6)
    np.testing.assert_array_equal(kv.values[0][0, :3, 0].astype(np.float32), t[:, 3].bfloat16().float())
    np.testing.assert_allclose(kv.keys[0][0, :3, 0].astype(np.float32), expected_k, rtol=2**-8)
    assert np.isnan(kv.keys[0][0, 3].astype(np.float32)).all()


def test_copy_blocks_copies_every_layer_in_order() -> None:
    kv = BACKEND.kv_cache(KVSpec(2, 1, 4, "float32"), 3, 2)
    for side in (*kv.keys, *kv.values):
        side[:] = normal(0, *side.shape)
    keys, values = np.array(kv.keys), np.array(kv.values)
    kv.copy_blocks([(0, 1), (1, 2)])
    for block in range(3):
        np.testing.assert_array_equal([side[block] for side in kv.keys], keys[:, 0])
        np.testing.assert_array_equal([side[block] for side in kv.values], values[:, 0])


def little_graph() -> Graph:
    """One layer with every op, 11 words, hidden size 12, 4 heads over 2."""
    norm = Norm("rms", normal(0, 12), None, 1e-6)
    table, qkv = (
        BACKEND.matrix([normal(1, 11, 12)], "float32"),
        BACKEND.matrix([normal(2, 32, 12)], "float32"),
    )
    out, down = BACKEND.matrix([normal(3, 12, 16)], "float32"), BACKEND.matrix([normal(4, 12, 20)], "float32")
    gated = BACKEND.gated_matrix(normal(5, 20, 12), normal(6, 20, 12), "float32")

    def hidden(g: Any) -> Any:
        x, angles = g(Embed(table)), g(RopeAngles(Rope(np.array([1.0, 0.1], np.float32))))
        q = g(StoreKV(g(Linear(g(Normalize(x, norm)), qkv)), 0, 4, angles, None, None))
        x = g(Linear(g(Attend(q, 0, 4, Attention(0.5, 5))), out, residual=x))
        x = g(Linear(g(GatedLinear(g(Normalize(x, norm)), gated, "gelu_tanh")), down, residual=x))
        return g(Normalize(g(SelectRows(x)), norm))

    return record(hidden, lambda g, x: g(Linear(x, table)), 11, 12)


SPEC = KVSpec(1, 2, 4, "float32")


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 5), st.integers(1, 5))
def test_batched_chunked_and_alone_are_bit_equal(lengths: list[int], block: int, chunk: int) -> None:
    graph, limits = little_graph(), Limits(64, 8, 64)
    whole = step([(n, n) for n in lengths], block)
    blocks = whole.block_table_SM.size
    batched = BACKEND.compile(graph, BACKEND.kv_cache(SPEC, blocks, block), limits).run(whole).numpy().copy()
    for b in range(len(lengths)):
        start, stop = whole.cu_q_B1[b], whole.cu_q_B1[b + 1]
        alone = BACKEND.compile(graph, BACKEND.kv_cache(SPEC, blocks, block), limits)
        for at in range(start, stop, chunk):
            end = min(at + chunk, stop)
            logits = alone.run(
                ModelInput(
                    whole.tokens_T[at:end],
                    whole.positions_T[at:end],
                    np.array([0, end - at], np.int32),
                    np.array([end - start], np.int32),
                    whole.slots_B[b : b + 1],
                    whole.block_table_SM,
                    np.arange(end - at, dtype=np.int32),
                )
            )
            np.testing.assert_array_equal(logits.numpy(), batched[at:end])


def test_logits_come_in_pieces_where_rows_exceed_the_limit() -> None:
    graph, inputs = little_graph(), step([(5, 5)], 8, rows=[4, 0, 2])
    whole = BACKEND.compile(graph, BACKEND.kv_cache(SPEC, 1, 8), Limits(8, 1, 3)).run(inputs).numpy().copy()
    pieces = BACKEND.compile(graph, BACKEND.kv_cache(SPEC, 1, 8), Limits(8, 1, 2))
    first = pieces.run(inputs)
    np.testing.assert_array_equal(first.numpy(), whole[:2])
    np.testing.assert_array_equal(pieces.logits(2, 3).numpy(), whole[2:])
    assert pieces.hidden().shape == (3, 12)
    with pytest.raises(EngineError, match="limit is 2"):
        pieces.logits(0, 3)
    none = replace(inputs, logit_rows_L=np.empty(0, np.int32))
    assert pieces.run(none).numpy().shape == (0, 11)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens_T": np.array([0, 11], np.int32)}, "token id"),
        ({"tokens_T": np.array([0, 1])}, "int32"),
        ({"positions_T": np.array([0, 2], np.int32)}, "consecutive"),
        ({"kv_len_B": np.array([9], np.int32)}, "consecutive"),
        ({"cu_q_B1": np.array([0, 1], np.int32)}, "cu_q"),
        ({"cu_q_B1": np.array([0, 1, 2], np.int32)}, "disagree"),
        ({"block_table_SM": np.array([[7]], np.int32)}, "block table"),
        ({"logit_rows_L": np.array([2], np.int32)}, "logit row"),
    ],
)
def test_a_step_that_breaks_its_promises_is_refused(changes: dict[str, Any], message: str) -> None:
    executable = BACKEND.compile(little_graph(), BACKEND.kv_cache(SPEC, 1, 4), Limits(4, 2, 4))
    with pytest.raises(EngineError, match=message):
        executable.run(replace(step([(2, 2)], 4), **changes))


def test_workspace_is_known_before_compiling() -> None:
    few = BACKEND.workspace_bytes(little_graph(), SPEC, Limits(8, 1, 1))
    more = BACKEND.workspace_bytes(little_graph(), SPEC, Limits(16, 1, 1))
    assert more - few == 8 * 4 * 4 * 32  # the widest activation is qkv, 32 wide
