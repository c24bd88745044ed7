"""Attention in the interpreter: values against float64, and bits that follow no batch, chunk, split, tile or place."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.devices.cuda.jit import InterpretedLauncher
from quire.devices.cuda.tiles import AttentionTile, Shape
from quire.devices.cuda.work import WorkShape, work_list
from tests.devices.cuda.paged import ROUNDED, Problem, answer, solve

RUN = InterpretedLauncher()
FEW = AttentionTile(32, 64, Shape())
CHANGES = ("sinks", "slopes", "bias", "scores")
TYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.float16, torch.float8_e5m2),
    (torch.bfloat16, torch.int8),
    (torch.float32, torch.int8),
    (torch.float16, torch.bfloat16),
]


def near(p: Problem, out: torch.Tensor, wanted: torch.Tensor) -> bool:
    coarsest = max(ROUNDED[p.act], ROUNDED.get(p.kept, 0.0))
    if torch.float32 in (p.act, p.kept):
        coarsest = ROUNDED[p.act]
    return bool(torch.isfinite(out).all()) and torch.allclose(
        out.double(), wanted, rtol=coarsest, atol=coarsest
    )


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize(("act", "kept"), TYPES)
def test_values_of_each_type(act: torch.dtype, kept: torch.dtype, latent: bool) -> None:
    about = {"groups": 1, "width": 16, "rotary": 16} if latent else {}
    p = Problem((3, 1), (20, 300), act=act, kept=kept, **about)
    assert near(p, solve(RUN, p), answer(p))


@pytest.mark.parametrize(
    "about",
    [
        {"changes": ("sinks",)},
        {"changes": ("slopes",)},
        {"changes": ("bias",)},
        {"changes": ("scores",)},
        {"cap": 2.0},
        {"window": 40},
        {"chunk": 64},
        {"ahead": 1 << 29},
        {"ahead": 3},
        {"cap": 5.0, "window": 7, "changes": CHANGES},
        {"heads": 6, "groups": 2, "width": 24},
        {"heads": 20, "groups": 1, "width": 16, "block": 32},
        {"heads": 3, "groups": 1, "width": 32, "rotary": 16},
        {"heads": 20, "groups": 1, "width": 24, "rotary": 8, "window": 40},
    ],
    ids=str,
)
def test_everything_that_changes_a_score(about: dict) -> None:
    p = Problem((5, 2), (280, 70), act=torch.float32, kept=torch.float32, **about)
    wanted = answer(p)
    for tile, processors in ((AttentionTile(128, 64, Shape()), 1), (FEW, 99)):
        assert near(p, solve(RUN, p, tile, processors), wanted)


@pytest.mark.parametrize(
    "about",
    [
        {"top": 30},
        {"top": 75, "pool": 4, "window": 290},
        {
            "top": 280,
            "groups": 1,
            "heads": 20,
            "width": 16,
            "rotary": 16,
            "act": torch.bfloat16,
            "kept": torch.int8,
        },
        {"top": 70, "pool": 4, "changes": ("sinks",), "cap": 3.0},
    ],
    ids=str,
)
def test_positions_that_a_query_chose(about: dict) -> None:
    """Lists of more than one segment, whole and split, with others and alone."""
    p = Problem((4, 1), (300, 410), **{"act": torch.float32, "kept": torch.float32, **about})
    out = solve(RUN, p, FEW)
    assert near(p, out, answer(p))
    assert torch.equal(solve(RUN, p, FEW, processors=99, places=3), out)
    assert torch.equal(solve(RUN, p, AttentionTile(128, 64, Shape())), out)
    assert torch.equal(solve(RUN, p.part(2, 3, 0), FEW), out[2:3])


@pytest.mark.parametrize("kept", [torch.float32, torch.int8, torch.float8_e5m2])
@pytest.mark.parametrize(
    "about",
    [
        {"every": 3, "window": 40, "changes": ("sinks",)},
        {"every": 3, "top": 260, "window": 290, "cap": 2.0},
        {"every": 2, "heads": 6, "width": 20, "block": 64},
        {"every": 32, "window": 9, "top": 3},
    ],
)
def test_entries_beside_a_layer_s_own_keys(about: dict, kept: torch.dtype) -> None:
    """Segments of keys, then of entries, whole and split, with others and alone."""
    act = torch.float32 if kept == torch.float32 else torch.bfloat16
    p = Problem((3, 1), (300, 810), groups=1, act=act, kept=kept, **about)
    out = solve(RUN, p, FEW)
    assert near(p, out, answer(p))
    assert torch.equal(solve(RUN, p, FEW, processors=99, places=3), out)
    assert torch.equal(solve(RUN, p, AttentionTile(128, 64, Shape())), out)
    assert torch.equal(solve(RUN, p.part(1, 2, 0), FEW), out[1:2])


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    act, kept = draw(st.sampled_from(TYPES))
    sequences = draw(st.integers(1, 3))
    counts = [draw(st.sampled_from([1, 2, 5, 18])) for _ in range(sequences)]
    lengths = [count + draw(st.sampled_from([0, 3, 255, 256, 520])) for count in counts]
    groups, of_group = draw(st.sampled_from([(1, 1), (2, 2), (1, 3), (2, 4)]))
    rotary = draw(st.sampled_from([0, 0, 16])) if groups == 1 else 0
    return Problem(
        tuple(counts), tuple(lengths), groups * of_group, groups,
        16 if rotary else draw(st.sampled_from([16, 24])), rotary,
        draw(st.sampled_from([16, 64])), act, kept, draw(st.sampled_from([0, 0, 5, 300])),
        cap=draw(st.sampled_from([0.0, 3.0])), changes=draw(st.sampled_from([(), ("sinks",), CHANGES])),
        seed=draw(st.integers(0, 99)),
    )  # fmt: skip


@given(problems(), st.integers(0, 99))
@settings(max_examples=12)
def test_a_row_follows_no_tile_split_place_or_padding(p: Problem, places: int) -> None:
    base = solve(RUN, p)
    assert near(p, base, answer(p))
    assert torch.equal(base, solve(RUN, p, FEW, processors=64, places=places, spare=1))


@given(problems(), st.data())
@settings(max_examples=12)
def test_a_row_follows_no_batch_and_no_chunk(p: Problem, data: st.DataObject) -> None:
    base = solve(RUN, p)
    sequence = data.draw(st.integers(0, len(p.counts) - 1))
    cut = data.draw(st.integers(0, p.counts[sequence]))
    row = sum(p.counts[:sequence])
    for begin, stop, tile in ((0, cut, FEW), (cut, p.counts[sequence], AttentionTile(128, 64, Shape()))):
        if begin < stop:
            alone = solve(RUN, p.part(begin, stop, sequence), tile, processors=1 + 9 * cut)
            assert torch.equal(base[row + begin : row + stop], alone)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3000)), min_size=1, max_size=5),
    st.sampled_from([(4, 2), (128, 1), (6, 2)]),
    st.sampled_from([0, 100, 700]),
    st.integers(1, 300),
)
@settings(max_examples=60)
def test_a_work_list_covers_each_key_once(
    sequences: list[tuple[int, int]], heads: tuple[int, int], window: int, processors: int
) -> None:
    counts, lengths = zip(*[(count, count + before) for count, before in sequences], strict=True)
    shape = WorkShape(*heads, AttentionTile(64, 32, Shape()), window)
    cu_q = np.cumsum([0, *counts]).astype(np.int32)
    work = work_list(cu_q, np.array(lengths, np.int32), shape, processors)
    seen: dict[int, list[int]] = {}
    numbers: dict[int, tuple[int, int]] = {}
    for items in (work.whole, work.split):
        for sequence, token, first, segments, number, *_ in items.tolist():
            assert cu_q[sequence] <= token < cu_q[sequence + 1]
            seen.setdefault(token, []).extend(range(first, first + segments))
            if items is work.split:
                state, begin = numbers.setdefault(token, (number, first))
                assert number == state + first - begin or number == state
    for token, covered in seen.items():
        sequence = int(np.searchsorted(cu_q, token, side="right")) - 1
        last = min(token + shape.tokens_of_tile, int(cu_q[sequence + 1]))
        end = lengths[sequence] - int(cu_q[sequence + 1]) + last
        start = max(0, end - (last - token) - window + 1) if window else 0
        assert sorted(covered) == list(range(start // 256, -(-end // 256)))
    split = {token + i for token in numbers for i in range(shape.tokens_of_tile)}
    merged = work.merges[:, 0].tolist()
    assert len(set(merged)) == len(merged)
    assert set(merged) <= split
    assert sum(len(seen[token]) for token in numbers) == work.partials
