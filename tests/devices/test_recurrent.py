"""Operations that carry a state: right by formulas written plainly, and the same bits however tokens come."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as changed
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from quire.devices.inputs import check_states
from quire.devices.ops import Linear, Normalize
from quire.devices.protocol import Backend, KVLayer, KVSpec, Norm, StateInput, StateSpec
from quire.devices.recurrent_ops import Convolve
from quire.devices.reference.backend import ReferenceBackend
from quire.devices.torch.backend import TorchBackend
from quire.errors import EngineError
from tests.devices.native_cases import ISAS, apply_rows, native, normal, rows_step
from tests.devices.recurrent_cases import (
    KINDS,
    Machine,
    Part,
    convolution,
    delta,
    drawn,
    gated,
    mamba1,
    mamba2,
)

BACKENDS: dict[str, Backend] = {
    "reference": ReferenceBackend(),
    "torch": TorchBackend(1),
    **{isa: native(isa) for isa in ISAS},
}
ROWS, OPEN = 8, 4


@pytest.fixture(params=BACKENDS, scope="module")
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]


def machine(backend: Backend, kind: str, seed: int, vocab: int = 40) -> tuple[Machine, Any, Any]:
    """A machine whose rows of states are all NaN, its case and its table of inputs; the last token's inputs are NaN."""
    rng = np.random.default_rng(seed)
    case = KINDS[kind](rng)
    x = drawn(case, rng, vocab)
    x[-1] = np.nan
    found = Machine(backend, case, x, ROWS, OPEN)
    nan = np.full(8, vocab - 1)
    for row in range(ROWS):  # NaN may mix with zeros only in the products that pick an operand
        found.run([Part(0, 0, 8, 8 - OPEN, row=row)], {0: nan})
    return found, case, x


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_the_plain_formula(backend: Backend, kind: str) -> None:
    found, case, x = machine(backend, kind, 1)
    tokens = np.random.default_rng(2).integers(0, 39, 60)
    wanted = case.plain(x[tokens].astype(np.float64))
    np.testing.assert_allclose(found.whole(tokens), wanted, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("form", [torch_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule])
def test_the_delta_rule_is_that_of_transformers(backend: Backend, form: Any) -> None:
    found, case, x = machine(backend, "delta", 6)
    tokens = np.arange(39)
    rates = case.op(None, None, None, 0, 0).rates
    qkv, steps, beta = np.split(x[tokens], [2 * 16 + 48, 2 * 16 + 48 + 4], axis=1)
    q, k, v = (
        torch.from_numpy(part).reshape(1, 39, -1, dim)
        for part, dim in zip(np.split(qkv, [16, 32], axis=1), (8, 8, 12), strict=True)
    )
    g, factors = torch.from_numpy(-rates * steps)[None], torch.from_numpy(beta)[None]
    wanted = form(q, k, v, g=g, beta=factors, use_qk_l2norm_in_kernel=True)[0].reshape(39, -1)
    np.testing.assert_allclose(found.whole(tokens), wanted.numpy(), rtol=1e-4, atol=1e-5)


class Sequence:
    """What a test knows of a sequence: its right tokens, and what its row of states has taken in."""

    def __init__(self, rng: np.random.Generator, row: int, tokens: Any) -> None:
        self.rng, self.row, self.tokens = rng, row, tokens
        self.committed, self.right = 0, 0  # tokens in the state, and right ones in its open rows
        self.shown = tokens  # the tokens that the next step computes, of which some may be wrong

    @property
    def left(self) -> int:
        return len(self.tokens) - self.committed - self.right

    def part(self, number: int) -> Part:
        """Plan its part of the next step: some tokens, of which the last ones may be taken back, and may be wrong."""
        rng, start = self.rng, self.committed + self.right
        count = int(rng.integers(1, min(self.left, 9) + 1))
        back = int(rng.integers(0, min(count, OPEN) + 1)) if rng.random() < 0.6 else 0
        kept, self.shown = count - back, self.tokens.copy()
        wrong = int(rng.integers(0, back + 1))
        self.shown[start + count - wrong : start + count] = rng.integers(0, 39, wrong)
        part = Part(number, start, start + count, kept, self.right, self.row)
        self.committed, self.right = start + kept, int(rng.integers(0, back - wrong + 1))
        return part

    def fork(self, row: int) -> Sequence:
        other = Sequence(self.rng, row, self.tokens.copy())
        other.committed, other.right = self.committed, self.right
        return other


@settings(deadline=None, max_examples=6)
@given(kind=st.sampled_from(sorted(KINDS)), seed=st.integers(0, 2**31))
def test_every_schedule_gives_the_same_bits(backend: Backend, kind: str, seed: int) -> None:
    check_schedules(backend, kind, seed)


def check_schedules(backend: Backend, kind: str, seed: int) -> None:
    """Chunks, batches, tokens that are taken back, forks and marks in any order equal each sequence whole."""
    rng = np.random.default_rng(seed)
    found, _, _ = machine(backend, kind, seed)
    live = [Sequence(rng, row, rng.integers(0, 39, int(rng.integers(1, 30)))) for row in (0, 3, 5)]
    whole = {id(one.tokens): found.whole(one.tokens, ROWS - 1) for one in live}
    for _ in range(40):
        live = [one for one in live if one.left]
        if not live:
            return
        chosen = [live[i] for i in rng.permutation(len(live))[: int(rng.integers(1, len(live) + 1))]]
        parts = [one.part(number) for number, one in enumerate(chosen)]
        free = [row for row in range(ROWS - 1) if row not in {one.row for one in live}]
        if free and rng.random() < 0.5:  # a mark, from which another sequence goes on
            number = int(rng.integers(len(parts)))
            count = int(rng.integers(parts[number].kept + 1))
            parts[number].marks.append((count, free[0]))
            other = chosen[number].fork(free.pop(0))
            other.committed, other.right = parts[number].start + count, 0
            whole[id(other.tokens)] = whole[id(chosen[number].tokens)]
            live.append(other)
        shown = {number: one.shown for number, one in enumerate(chosen)}
        for part, one, rows in zip(parts, chosen, found.run(parts, shown), strict=True):
            right = one.shown[part.start : part.stop] == one.tokens[part.start : part.stop]
            right = np.logical_and.accumulate(right)
            wanted = whole[id(one.tokens)][part.start : part.stop]
            assert rows[right].tobytes() == wanted[right].tobytes()
        if free and rng.random() < 0.3:  # a copy, which has its open rows too
            source = live[int(rng.integers(len(live)))]
            found.kv.copy_states([(source.row, free[0])])
            other = source.fork(free[0])
            whole[id(other.tokens)] = whole[id(source.tokens)]
            live.append(other)


def test_rows_are_copied_in_order(backend: Backend) -> None:
    found, _, _ = machine(backend, "delta", 3)
    tokens = np.arange(20)
    wanted = found.whole(tokens, 7)
    found.run([Part(0, 0, 10, 8, row=0)], {0: tokens})
    found.kv.copy_states([(0, 4), (4, 2)])
    got = found.run([Part(0, 10, 20, 10, 2, row=2)], {0: tokens})[0]
    assert got.tobytes() == wanted[10:].tobytes()


STATES = Part(0, 4, 8, 3, 2, 1, [(0, 2), (3, 3)])


@pytest.mark.parametrize(
    "part",
    [
        replace(STATES, row=ROWS),
        replace(STATES, row=-1),
        replace(STATES, marks=[(0, 1)]),
        replace(STATES, marks=[(0, 2), (1, 2)]),
        replace(STATES, marks=[(4, 2)]),
        replace(STATES, marks=[(-1, 2)]),
        replace(STATES, open=OPEN + 1, start=6),
        replace(STATES, open=2, start=1),
        replace(STATES, open=-1),
        replace(STATES, kept=5),
        replace(STATES, kept=-1),
        replace(STATES, stop=12, kept=3),
    ],
)
def test_steps_that_name_no_state_are_refused(backend: Backend, part: Part) -> None:
    found, _, _ = machine(backend, "gated", 4)
    tokens = {0: np.arange(20)}
    found.run([Part(0, 0, 6, 2, row=1)], tokens)
    with pytest.raises(EngineError):
        found.run([part], tokens)
    found.run([STATES], tokens)


def test_a_step_without_states_is_refused(backend: Backend) -> None:
    found, _, _ = machine(backend, "gated", 4)
    with pytest.raises(EngineError, match="without their rows"):
        found.executable.run(rows_step(3))


def test_marks_come_in_order() -> None:
    states = StateInput(
        *(np.array([n], np.int32) for n in (0, 0, 3)), np.array([[0, 2, 1], [0, 1, 2]], np.int32)
    )
    with pytest.raises(EngineError, match="in order"):
        check_states(changed(rows_step(3), states=states), 4, 0)
    wrong = changed(states, marks_M3=np.array([[1, 2, 1]], np.int32))
    with pytest.raises(EngineError, match="marked"):
        check_states(changed(rows_step(3), states=wrong), 4, 0)
    with pytest.raises(EngineError, match="int32"):
        check_states(changed(rows_step(3), states=changed(states, open_B=np.array([0]))), 4, 0)


def test_bytes_of_a_row_count_states_and_open_rows() -> None:
    states = StateSpec((3, 8), row=8), StateSpec((2, 4, 4), row=20)
    spec = KVSpec(2, 1, 4, "bfloat16", layers=(KVLayer(1, 4), KVLayer(0, 4, states=states)))
    assert spec.bytes_per_state(0) == 4 * (24 + 32)
    assert spec.bytes_per_state(3) == 4 * (24 + 32 + 3 * 28)


def test_a_backend_says_which_operation_it_lacks(backend: Backend) -> None:
    class Unknown(Convolve[Any], frozen=True, eq=False):
        pass

    weight = np.ones((4, 2), np.float32)
    with pytest.raises(EngineError, match="Unknown"):
        apply_rows(backend, np.ones((4, 4), np.float32), lambda g, t: g(Unknown(t, weight, 0, 0)), 4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_threads_and_columns_do_not_change_a_bit(isa: str, kind: str) -> None:
    """Wide shapes, whose columns are divided among threads when a step has few sequences."""
    wide = {
        "delta": lambda rng: delta(rng, 1, 2, 33, 150),
        "delta by channel": lambda rng: delta(rng, 2, 2, 40, 130, True),
        "mamba2": lambda rng: mamba2(rng, 2, 150, 1, 19),
        "mamba1": lambda rng: mamba1(rng, 300, 16),
        "gated": lambda rng: gated(rng, 700),
        "convolution": lambda rng: convolution(rng, 700),
        "dilated convolution": lambda rng: convolution(rng, 700, 3, dilation=2),
    }
    if kind not in wide:
        return
    rng = np.random.default_rng(5)
    case = wide[kind](rng)
    x = drawn(case, rng, 30)
    tokens = rng.integers(0, 30, 40)
    wanted = Machine(native(isa, 1), case, x).whole(tokens)
    np.testing.assert_allclose(wanted, case.plain(x[tokens].astype(np.float64)), rtol=2e-5, atol=5e-5)
    several = Machine(native(isa, 3), case, x)
    assert several.whole(tokens).tobytes() == wanted.tobytes()
    parts = [Part(i, 0, n, n - i, row=i) for i, n in enumerate((40, 17, 18, 5))]
    for part, rows in zip(parts, several.run(parts, dict.fromkeys(range(4), tokens)), strict=True):
        assert rows.tobytes() == wanted[: part.stop].tobytes()


@pytest.mark.parametrize("isa", ISAS)
def test_norms_of_groups_equal_the_reference(isa: str) -> None:
    x, weight, bias = (
        normal(np.random.default_rng(i), *shape) for i, shape in enumerate(((7, 60), (60,), (60,)))
    )
    weights = np.eye(60, dtype=np.float32)
    for norm in (Norm("rms", weight, None, 1e-5), Norm("layer", weight, bias, 1e-5)):

        def body(backend: Backend, norm: Norm = norm) -> Any:
            matrix = backend.matrix([weights], "float32")  # a product takes norms of whole rows into itself
            return lambda g, t: g(Linear(g(Normalize(t, norm, groups=5)), matrix))

        got, want = (apply_rows(one, x, body(one), 60) for one in (native(isa), BACKENDS["reference"]))
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    with pytest.raises(EngineError, match="equal groups"):
        apply_rows(native(isa), x, lambda g, t: g(Normalize(t, norm, groups=7)), 60)


def test_the_native_cache_takes_layers_that_keep_states_alone_and_refuses_rows_that_it_lacks() -> None:
    spec = KVSpec(1, 0, 4, "float32", layers=(KVLayer(0, 4, states=(StateSpec((3, 5), row=5),)),))
    kv = native().kv_cache(spec, 2, 4, 3, 1)
    kv.copy_blocks([(0, 1)])
    kv.copy_states([])
    kv.copy_states([(2, 0), (1, 1)])
    for copies in ([(0, 3)], [(-1, 0)]):
        with pytest.raises(EngineError, match="outside the cache's 3 rows"):
            kv.copy_states(copies)


def test_recurrences_that_do_not_fit_their_state_are_refused() -> None:
    x = np.ones((4, 6), np.float32)
    for weight, layer, state in ((np.ones((6, 3)), 1, 1), (np.ones((6, 2)), 0, 0), (np.ones((6, 2)), 1, 2)):
        case = convolution(np.random.default_rng(0), 6, 2)
        case.op = lambda t, *place, w=weight, at=(layer, state): Convolve(t, w.astype(np.float32), *at)  # type: ignore[misc]
        with pytest.raises(EngineError, match="recurrence"):
            Machine(native(), case, x)


@pytest.mark.parametrize("isa", ISAS)
def test_softplus_is_right_at_every_size(isa: str) -> None:
    """Times of states are softplus of a projection; NaN stays NaN."""
    x = np.concatenate([np.linspace(-80, 80, 2001), [-np.inf, np.inf, np.nan, 0.0]]).astype(np.float32)[
        :, None
    ]
    one = native(isa).matrix([np.ones((1, 1), np.float32)], "float32")
    got = apply_rows(native(isa), x, lambda g, t: g(Linear(t, one, activation="softplus")), 1)
    with np.errstate(invalid="ignore"):
        wanted = np.logaddexp(0, x.astype(np.float64))
    np.testing.assert_allclose(got, wanted, rtol=6e-7)
