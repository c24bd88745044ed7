"""Paged attention of every instruction set against plain softmax in float64, and its exactness bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import _native

ISAS = _native.available_isas()
POOLS = {threads: _native.ThreadPool(threads) for threads in (1, 2, 3)}


@dataclass(frozen=True)
class Case:
    """Sequences with `computed` tokens in the cache and `new` tokens to compute; heads = kv_heads * group.

    window, chunk and cap are 0 where there is none; `slopes` and `sinks` are drawn from the seed. `shared` has for each
    sequence an earlier one and how many tokens it begins with as that does: whole blocks of them are the same blocks.
    """

    kv_heads: int
    group: int
    head_dim: int
    block_size: int
    window: int
    computed: tuple[int, ...]
    new: tuple[int, ...]
    bf16: bool = False
    seed: int = 0
    chunk: int = 0
    cap: float = 0.0
    slopes: bool = False
    sinks: bool = False
    ahead: int = 0
    shared: tuple[tuple[int, int], ...] = ()

    def shared_blocks(self, b: int) -> tuple[int, int]:
        """The sequence whose first blocks sequence b has too, and how many of them."""
        parent, tokens = self.shared[b] if self.shared else (b, 0)
        lengths = (self.computed[i] + self.new[i] for i in (b, parent))
        return parent, min(tokens, *lengths) // self.block_size

    def first(self, position: int) -> int:
        """The first position that a query at `position` sees."""
        windowed = max(0, position - self.window + 1) if self.window else 0
        return max(windowed, position // self.chunk * self.chunk) if self.chunk else windowed

    def by_head(self, wanted: bool, salt: int) -> np.ndarray | None:
        values = np.random.default_rng(self.seed + salt).standard_normal(self.kv_heads * self.group)
        return np.abs(values).astype(np.float32) if wanted else None


@dataclass
class Data:
    """Queries and whole keys and values by sequence: [tokens, heads, H]."""

    q: list[np.ndarray]
    k: list[np.ndarray]
    v: list[np.ndarray]


def make(case: Case) -> Data:
    rng = np.random.default_rng(case.seed)
    dtype = ml_dtypes.bfloat16 if case.bf16 else np.float32
    data = Data([], [], [])
    for b, (computed, new) in enumerate(zip(case.computed, case.new, strict=True)):
        shape = (computed + new, case.kv_heads, case.head_dim)
        data.q.append(
            rng.standard_normal((shape[0], case.kv_heads * case.group, case.head_dim)).astype(np.float32)
        )
        data.k.append(rng.standard_normal(shape).astype(np.float32).astype(dtype))
        data.v.append(rng.standard_normal(shape).astype(np.float32).astype(dtype))
        parent, blocks = case.shared_blocks(b)
        for whole in (data.k, data.v):
            whole[b][: blocks * case.block_size] = whole[parent][: blocks * case.block_size]
    return data


def rounds(case: Case, isa: str) -> bool:
    """Whether queries and weights are rounded to bfloat16, to be multiplied in pairs."""
    return case.bf16 and "bf16" in isa


def expected(case: Case, data: Data, rounded: bool = False) -> list[tuple[np.ndarray, np.ndarray]]:
    """Softmax over all visible positions at once, for the new tokens of each sequence, and how far it may be missed.

    Weights that are rounded to bfloat16 are off by 2^-8 of themselves at most.
    """
    out, scale = [], 1 / np.sqrt(case.head_dim)
    slopes, sinks = case.by_head(case.slopes, 2), case.by_head(case.sinks, 3)
    for b, (computed, new) in enumerate(zip(case.computed, case.new, strict=True)):
        rows = np.empty((new, case.kv_heads * case.group, case.head_dim))
        slack = np.zeros_like(rows)
        q = data.q[b].astype(np.float64) * scale
        if rounded:
            q = (data.q[b] * np.float32(scale)).astype(ml_dtypes.bfloat16).astype(np.float64)
        for i in range(new):
            last = computed + i
            first = case.first(last)
            for head in range(case.kv_heads * case.group):
                end = min(last + case.ahead, computed + new - 1) + 1
                k = data.k[b][first:end, head // case.group].astype(np.float64)
                v = data.v[b][first:end, head // case.group].astype(np.float64)
                s = k @ q[last, head]
                if case.cap:
                    s = case.cap * np.tanh(s / case.cap)
                if slopes is not None:
                    s = s + slopes[head] * np.arange(first - last, end - last)
                sink = -np.inf if sinks is None else float(sinks[head])
                top = max(s.max(), sink)
                w = np.exp(s - top)
                w /= w.sum() + np.exp(sink - top)
                rows[i, head] = w @ v
                if rounded:
                    slack[i, head] = w @ np.abs(v) / 256
        out.append((rows, slack))
    return out


def attend(case: Case, data: Data, isa: str, threads: int) -> list[np.ndarray]:
    """One native call: a shuffled cache, NaN wherever no query looks, a poisoned output."""
    size, rng = case.block_size, np.random.default_rng(case.seed + 1)
    lengths = [c + n for c, n in zip(case.computed, case.new, strict=True)]
    needed = [-(-length // size) for length in lengths]
    num_blocks = sum(needed) + 2
    ids = rng.permutation(num_blocks)
    dtype = ml_dtypes.bfloat16 if case.bf16 else np.float32
    keys = np.full((num_blocks, case.kv_heads, case.head_dim, size), np.nan, dtype)
    values = np.full((num_blocks, case.kv_heads, size, case.head_dim), np.nan, dtype)
    slots = rng.permutation(len(lengths) + 1)[: len(lengths)].astype(np.int32)
    table = np.full((len(lengths) + 1, max(needed) + 1), -(2**31), np.int32)
    tables: list[np.ndarray] = []
    for b, length in enumerate(lengths):
        parent, common = case.shared_blocks(b)
        blocks, ids = ids[: needed[b]].copy(), ids[needed[b] :]
        blocks[:common] = tables[parent][:common] if common else ()
        tables.append(blocks)
        table[slots[b], : needed[b]] = blocks
        for p in range(case.first(case.computed[b]), length):
            keys[blocks[p // size], :, :, p % size] = data.k[b][p]
            values[blocks[p // size], :, p % size] = data.v[b][p]
        windowed = max(0, case.computed[b] - case.window + 1) if case.window else 0
        table[slots[b], : windowed // size] = -(2**31)
    q = np.concatenate([x[c:] for x, c in zip(data.q, case.computed, strict=True)])
    out = np.full_like(q, np.nan)
    bits: Any = (lambda x: x.view(np.uint16)) if case.bf16 else (lambda x: x)
    cache = _native.AttentionCache(bits(keys), bits(values))
    cu_q = np.concatenate([[0], np.cumsum(case.new)]).astype(np.int32)
    scale = float(np.float32(1 / np.sqrt(case.head_dim)))
    kv_len = np.array(lengths, np.int32)
    slopes, sinks = case.by_head(case.slopes, 2), case.by_head(case.sinks, 3)
    options = case.window, case.chunk, case.ahead, case.cap, slopes, sinks
    _native.attention(isa, POOLS[threads], cache, q, out, cu_q, kv_len, slots, table, scale, *options)
    return np.split(out, cu_q[1:-1])


def check(case: Case, isa: str, threads: int) -> list[np.ndarray]:
    data = make(case)
    out = attend(case, data, isa, threads)
    # Slopes lift positions ahead to scores of some tens, whose last bits are that much larger.
    atol = 3e-5 if case.slopes and case.ahead else 2e-6
    for ours, (theirs, slack) in zip(out, expected(case, data, rounds(case, isa)), strict=True):
        np.testing.assert_array_less(np.abs(ours - theirs), slack + 2e-5 * np.abs(theirs) + atol)
    return out


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = st.tuples(st.integers(0, 140), st.integers(1, 70))
    pairs = draw(st.lists(lengths, min_size=1, max_size=3))
    return Case(
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 3, 4, 7])),
        head_dim=draw(st.sampled_from([1, 7, 16, 24, 48, 64, 80, 128])),
        block_size=draw(st.sampled_from([1, 3, 8, 16, 24, 32, 48, 64])),
        window=draw(st.sampled_from([0, 0, 1, 5, 16, 64, 100])),
        computed=tuple(c for c, _ in pairs),
        new=tuple(n for _, n in pairs),
        bf16=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
        chunk=draw(st.sampled_from([0, 0, 1, 7, 16, 50])),
        cap=draw(st.sampled_from([0.0, 0.0, 1.5, 30.0])),
        slopes=draw(st.booleans()),
        sinks=draw(st.booleans()),
    )


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from(ISAS), st.sampled_from([1, 2, 3]))
def test_equals_plain_softmax(case: Case, isa: str, threads: int) -> None:
    check(case, isa, threads)


@settings(max_examples=40, deadline=None)
@given(cases(), st.sampled_from([1, 7, 64, 1 << 20]), st.sampled_from(ISAS), st.sampled_from([1, 2, 3]))
def test_positions_ahead_are_seen_as_far_as_the_sequence_goes(
    case: Case, ahead: int, isa: str, threads: int
) -> None:
    check(replace(case, ahead=ahead), isa, threads)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 96, 128, 256])
def test_head_dims(isa: str, head_dim: int) -> None:
    check(Case(2, 2, head_dim, 16, 0, (0, 130), (33, 1), bf16=head_dim % 64 == 0), isa, 2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 2, 32, 16, 0, (3000, 0, 1023), (2, 5, 3), bf16=True),
        Case(1, 2, 32, 16, 1500, (3000, 0, 1023), (2, 5, 3), bf16=True),
        Case(6, 1, 16, 16, 0, (2100, 40), (1, 2), bf16=True),  # several heads in a job
    ],
    ids=["whole", "window", "heads"],
)
def test_many_segments(isa: str, case: Case) -> None:
    """Contexts longer than a segment, split over threads when there are few jobs."""
    whole = check(case, isa, 1)
    for threads in (2, 3):
        for ours, one in zip(attend(case, make(case), isa, threads), whole, strict=True):
            np.testing.assert_array_equal(ours, one)


def test_split_waves_equal_one_thread() -> None:
    """More segments than one wave of split tasks holds."""
    case = Case(1, 1, 16, 16, 0, (40_000,), (3,))
    data = make(case)
    np.testing.assert_array_equal(attend(case, data, ISAS[0], 3)[0], attend(case, data, ISAS[0], 1)[0])


@settings(max_examples=40, deadline=None)
@given(cases(), st.sampled_from(ISAS), st.data())
def test_bits_depend_on_the_sequence_alone(case: Case, isa: str, data: st.DataObject) -> None:
    """Another block size, other chunks, no batch, other threads: the same bits."""
    tensors = make(case)
    whole = attend(case, tensors, isa, 1)
    size, threads = data.draw(st.integers(1, 64)), data.draw(st.sampled_from([1, 2, 3]))
    b = data.draw(st.integers(0, len(case.new) - 1))
    alone = Data([tensors.q[b]], [tensors.k[b]], [tensors.v[b]])
    start, done = case.computed[b], 0
    while done < case.new[b]:
        chunk = data.draw(st.integers(1, case.new[b] - done))
        end = start + done + chunk
        part = replace(case, block_size=size, computed=(start + done,), new=(chunk,))
        cut = Data([alone.q[0][:end]], [alone.k[0][:end]], [alone.v[0][:end]])
        np.testing.assert_array_equal(attend(part, cut, isa, threads)[0], whole[b][done : done + chunk])
        done += chunk


@st.composite
def sharing(draw: st.DrawFn) -> Case:
    """Up to eight sequences, each beginning with blocks of an earlier one."""
    case, count = draw(cases()), draw(st.integers(2, 8))
    starts = draw(st.sampled_from([100, 500, 1200]))
    lengths = st.tuples(st.integers(starts // 2, starts), st.sampled_from([1, 1, 1, 4, 50]))
    pairs = [draw(lengths) for _ in range(count)]
    return replace(
        case,
        kv_heads=draw(st.integers(1, 2)),
        head_dim=draw(st.sampled_from([7, 16, 64])),
        computed=tuple(c for c, _ in pairs),
        new=tuple(n for _, n in pairs),
        shared=(
            (0, 0),
            *((draw(st.integers(0, b - 1)), draw(st.integers(0, starts))) for b in range(1, count)),
        ),
        ahead=draw(st.sampled_from([0, 0, 3])),
        window=draw(st.sampled_from([0, 0, 0, 100, 700])),
    )


@settings(max_examples=60, deadline=None)
@given(sharing(), st.sampled_from(ISAS), st.sampled_from([1, 2, 3]))
def test_shared_blocks_change_no_bits(case: Case, isa: str, threads: int) -> None:
    tensors = make(case)
    together = attend(case, tensors, isa, threads)
    for b in range(len(case.new)):
        alone = replace(case, computed=(case.computed[b],), new=(case.new[b],), shared=())
        part = Data([tensors.q[b]], [tensors.k[b]], [tensors.v[b]])
        np.testing.assert_array_equal(attend(alone, part, isa, 1)[0], together[b])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bf16", [False, True])
def test_a_batch_that_shares_its_prompt(isa: str, bf16: bool) -> None:
    """Enough rows for groups of many sequences, over whole shared segments and parts of them."""
    count = 24
    case = Case(
        2, 2, 32, 16, 0, (1500,) * count, (1,) * count, bf16, shared=((0, 0), *[(0, 1300)] * (count - 1))
    )
    check(case, isa, 1)
    check(replace(case, window=700), isa, 3)


def test_large_scores_stay_finite() -> None:
    case = Case(1, 1, 16, 16, 0, (0,), (200,))
    data = make(case)
    data.q[0] *= 1000
    out = attend(case, data, ISAS[0], 2)[0]
    np.testing.assert_allclose(out, expected(case, data)[0][0], rtol=1e-3, atol=1e-3)


def test_misuse_is_refused() -> None:
    cache = _native.AttentionCache(np.zeros((2, 1, 16, 16), np.float32), np.zeros((2, 1, 16, 16), np.float32))
    q = np.zeros((1, 1, 16), np.float32)

    def call(cu_q: list[int], kv_len: list[int], slots: list[int], table: list[list[int]]) -> None:
        arrays = [np.array(x, np.int32) for x in (cu_q, kv_len, slots, table)]
        _native.attention("auto", POOLS[1], cache, q, np.zeros_like(q), *arrays, 1.0, 0)

    call([0, 1], [1], [0], [[1]])
    for bad in (
        ([0, 1], [0], [0], [[1]]),
        ([0, 1], [17], [0], [[1]]),
        ([0, 1], [1], [1], [[1]]),
        ([0, 1], [1], [0], [[2]]),
        ([0, 2], [2], [0], [[1]]),
    ):
        with pytest.raises(ValueError, match=r"must|exceeds|outside"):
            call(*bad)
