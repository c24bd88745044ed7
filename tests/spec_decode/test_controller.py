"""The controller: what it drafts follows from measured costs and acceptance. Times are given, not measured."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.spec_decode.acceptance import START, Odds, Tally
from quire.spec_decode.controller import LONGEST_NAP, Controller
from quire.spec_decode.costs import DraftCosts, StepCosts


def controller(seconds: Callable[[int], float], most: int = 200) -> Controller:
    made = Controller()
    for rows in range(1, most):
        made.steps.record(rows, seconds(rows))
    return made


def free(rows: int) -> float:
    """A step that costs the same up to 16 rows, and in proportion beyond."""
    return max(1.0, rows / 16)


def test_drafts_fill_what_a_step_gives_for_nothing() -> None:
    made = controller(free)
    assert made.plan([[0.5, 0.25, 0.1, 0.01]], 1) == [4]
    assert made.plan([[0.9**i for i in range(1, 31)]], 1) == [15], "more would cost more than they bring"


def test_nothing_is_drafted_where_rows_cost_as_much_as_steps() -> None:
    made = controller(float)
    assert made.plan([[0.9, 0.8]], 1) == [0]
    assert made.plan([[0.9, 0.8]] * 64, 64) == [0] * 64


def test_the_likeliest_tokens_of_all_sequences_come_first() -> None:
    made = controller(free)
    counts = made.plan([[0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]] + [[0.1] * 8] * 7, 8)
    assert counts[0] == 8
    assert sum(counts) == 8


def test_drafting_that_takes_long_is_not_done() -> None:
    made = controller(free)
    made.drafting.record(4, 40.0)  # the first is not counted
    made.drafting.record(4, 40.0)
    assert made.plan([[0.9, 0.8, 0.7]], 1) == [0]
    made = controller(free)
    made.drafting.record(4, 0.4)
    made.drafting.record(4, 0.4)
    assert made.plan([[0.9, 0.8, 0.1]], 1) == [2]


def test_after_drafts_that_do_not_pay_it_sleeps_longer_and_longer_then_probes() -> None:
    made = controller(lambda rows: 1.0 + 0.2 * rows)
    planned, drafted = 0, 0
    for _ in range(2000):
        if not made.asleep(1):
            planned += 1
            drafted += sum(made.plan([[0.05, 0.0]], 1))
    assert planned < 10 + 2000 // LONGEST_NAP + 5
    assert 0 < drafted < 2 * planned, "it looks whether acceptance has changed"


def test_it_wakes_when_sequences_have_ended() -> None:
    made = controller(free)
    for _ in range(20):
        if not made.asleep(64):
            made.plan([[0.3]] * 64, 64)
    assert made.asleep(64)
    assert not made.asleep(16)


def test_pinned_drafts_have_their_full_length() -> None:
    made = Controller(adaptive=False)
    assert not made.asleep(1)
    assert made.plan([[0.0, 0.0, 0.0], [0.0]], 2) == [3, 1]


def test_costs_between_and_beyond_what_was_measured() -> None:
    costs = StepCosts()
    assert costs.seconds(3) == 1.0
    costs.record(2, 4.0)
    assert (costs.seconds(1), costs.seconds(9)) == (4.0, 4.0), "rows are free until they are tried"
    costs.record(6, 8.0)
    assert (costs.seconds(4), costs.seconds(8)) == (6.0, 10.0)
    for _ in range(60):
        costs.record(6, 6.0)
    assert costs.seconds(6) == pytest.approx(6.0, abs=0.01)
    costs.record(6, 600.0)
    assert costs.seconds(6) < 8.0, "one step that something else held up counts little"


def test_odds_begin_with_those_of_all_sequences_and_follow_the_own() -> None:
    everyone = Tally(0.99)
    first = Odds(everyone)
    assert first.cumulative(2) == pytest.approx([START, START**2])
    for _ in range(100):
        first.record(3, 1)
    chance = first.cumulative(3)
    assert chance[0] > 0.95
    assert chance[1] < 0.1
    newcomer = Odds(everyone)
    assert newcomer.cumulative(1)[0] > 0.9
    for _ in range(20):
        newcomer.record(12, 0)
    assert newcomer.cumulative(1)[0] < 0.2
    assert len(newcomer.cumulative(12)) == 12


def test_a_time_of_drafting_that_was_too_long_is_forgotten() -> None:
    """Nothing is drafted, so nothing measures it again; it is halved in each long nap instead."""
    costs = DraftCosts()
    costs.record(1, 50.0)
    assert costs.seconds(3) == 0.0, "the first draft finds the drafter cold"
    costs.record(1, 50.0)
    for _ in range(20):
        costs.doubt()
    assert costs.seconds(1) < 1e-4
