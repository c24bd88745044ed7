"""Operations that carry a state: right by formulas written plainly, and the same bits however tokens come."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as changed

from quire.devices.graph import record
from quire.devices.inputs import check_states
from quire.devices.ops import Embed, Linear, SelectRows
from quire.devices.protocol import Backend, KVLayer, KVSpec, Limits, StateInput, StateSpec
from quire.devices.recurrent_ops import Convolve
from quire.devices.reference.backend import ReferenceBackend
from quire.devices.torch.backend import TorchBackend
from quire.errors import EngineError
from tests.devices.native_cases import rows_step
from tests.devices.recurrent_cases import KINDS, Machine, Part, drawn

BACKENDS: dict[str, Backend] = {"reference": ReferenceBackend(), "torch": TorchBackend(1)}
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


def test_a_backend_says_which_operation_it_lacks() -> None:
    backend = ReferenceBackend()
    table = backend.matrix([np.ones((4, 4), np.float32)], "float32")

    class Unknown(Convolve[Any], frozen=True, eq=False):
        pass

    graph = record(
        lambda g: g(SelectRows(g(Unknown(g(Embed(table)), np.ones((4, 2), np.float32), 0, 0)))),
        lambda g, h: g(Linear(h, table)),
        4,
        4,
    )
    for one in BACKENDS.values():
        kv = one.kv_cache(KVSpec(1, 1, 4, "float32"), 4, 4)
        with pytest.raises(EngineError, match="Unknown"):
            one.compile(graph, kv, Limits(4, 1, 4))
