"""docs/security.md states the bound of each field of a request and of each step of a program: those that hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from quire import params, steps
from quire.client import grammar_check, program_checks, request_checks
from quire.fields import MAX_BEAMS, MAX_N
from quire.lora import arena
from quire.program import program_requests, sessions, tasks
from quire.sched import plan
from quire.serve import adapters, call, threads
from quire.serve.openai import texts
from quire.spec_decode import lookup, suffix
from quire.steps import AnyStep, Fork, Gen, Repeat, Select

PAGE = (Path(__file__).parents[1] / "docs" / "security.md").read_text()


def rows(heading: str) -> dict[str, str]:
    """The bound of each name in the first column of the table that begins with `heading`."""
    lines = PAGE.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    found = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        names, bound = [cell.strip() for cell in line.strip("|").split(" | ")]
        found |= dict.fromkeys(re.findall(r"`([^`]+)`", names) or [names], bound)
    return found


FIELDS, STEPS = rows("Field"), rows("Step of a program")
PASSES, POOLS = rows("Between two forward passes"), rows("Pool")


def test_each_field_of_a_request_has_a_bound() -> None:
    assert set(FIELDS) == set(params.SamplingParams.__struct_fields__)


def test_each_step_of_a_program_has_a_bound() -> None:
    assert set(STEPS) == {step.__struct_config__.tag for step in get_args(AnyStep)}


def most(step: type, name: str) -> int:
    """The largest value, or length, of a field of a step."""
    limits = re.findall(
        r"(?:le|max_length)=(\d+)", str(step.__annotations__[name]).replace("1 << 20", str(1 << 20))
    )
    return int(limits[-1])


@pytest.mark.parametrize(
    ("table", "name", "bounds"),
    [
        (FIELDS, "n", [MAX_N, texts.MAX_PROMPTS]),
        (FIELDS, "stop", [params.MAX_STOP_STRINGS, params.MAX_WORD_CHARACTERS]),
        (FIELDS, "bad_words", [params.MAX_BAD_WORDS, params.MAX_WORD_CHARACTERS]),
        (FIELDS, "stop_token_ids", [params.MAX_STOP_TOKENS]),
        (FIELDS, "logit_bias", [params.MAX_BIASED_TOKENS]),
        (FIELDS, "logprob_token_ids", [request_checks.MAX_ASKED_TOKENS]),
        (FIELDS, "prompt_logprobs", [call.MAX_SCORES]),
        (FIELDS, "structured_outputs", [params.MAX_CONSTRAINT_BYTES]),
        (FIELDS, "repetition_detection", [params.MAX_PATTERN]),
        (FIELDS, "beam", [MAX_BEAMS]),
        (STEPS, "text", [1 << 20, program_requests.CHARACTERS_PER_TOKEN]),
        (STEPS, "gen", [most(Gen, "n"), program_checks.MAX_TOKENS]),
        (STEPS, "select", [most(Select, "choices"), program_checks.MAX_CHOICES]),
        (STEPS, "fork", [most(Fork, "branches"), program_checks.MAX_LANES]),
        (STEPS, "repeat", [most(Repeat, "times"), program_checks.MAX_STEPS]),
        (STEPS, "if", [most(steps.Condition, "one_of")]),
        (STEPS, "role", [program_checks.MAX_DEPTH]),
        (PASSES, "tables of lists", [plan.MOST_ENTRIES]),
        (PASSES, "log-probabilities", [plan.MOST_ENTRIES]),
        (PASSES, "steps and texts of all programs", [tasks.TURN_SECONDS * 1000]),
        (PASSES, "predictions searched", [lookup.MOST_SEARCHED]),
        (PASSES, "prompts that enter suffix trees", [suffix.MOST_GROWN]),
        (POOLS, "sessions of programs", [sessions.MAX_SESSIONS, sessions.MAX_CHARACTERS]),
        (POOLS, "grammars that wait to be compiled", [grammar_check.MAX_WAITING]),
        (POOLS, "names of adapters loaded at run time", [adapters.MOST_NAMES]),
    ],
)
def test_the_bounds_are_those_that_hold(table: dict[str, str], name: str, bounds: list[float]) -> None:
    assert [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", table[name])] == bounds


def test_the_times_are_those_that_hold() -> None:
    assert f"not pinned may take {arena.LOAD_SECONDS:g} seconds" in " ".join(PAGE.split())
    assert f"is remembered for {arena.REMEMBER_SECONDS:g} seconds" in " ".join(PAGE.split())
    assert f"more than {threads.FEW_SCORES:,} log-probabilities" in " ".join(PAGE.split())
