"""Expressions of files: what Python's `re` finds, in a time that no file and no name can make long."""

from __future__ import annotations

import random
import re

import pytest

from quire.errors import ModelError
from quire.weights.expressions import Expressions

SIGNS = "ab.c1"


def _drawn(rng: random.Random, depth: int = 0) -> str:
    kind = rng.random()
    if depth > 3 or kind < 0.35:
        return rng.choice(
            ["a", "b", r"\.", ".", "[ab]", "[^a]", r"\w", "c", r"\d", "1", "[]a]", r"[\w.]", r"\D"]
        )
    inner = _drawn(rng, depth + 1)
    if kind < 0.6:
        return inner + _drawn(rng, depth + 1)
    if kind < 0.7:
        return f"({inner}|{_drawn(rng, depth + 1)})"
    if kind < 0.8:
        return f"(?:{inner})" + rng.choice(
            ["*", "+", "?", "{2}", "{1,2}", "{0,2}", "{1,}", "*?", "{2}?", "{,2}"]
        )
    if kind < 0.9:
        return rng.choice("ab.") + rng.choice(["*", "+", "?", "{2}"])
    return f"^{inner}" if kind < 0.95 else f"{inner}$"


def test_the_first_expression_that_matches_is_the_one_that_python_finds() -> None:
    rng = random.Random(5)
    for _ in range(2000):
        patterns = [_drawn(rng) for _ in range(rng.randint(1, 4))]
        expressions = Expressions(patterns, "file")
        for _ in range(5):
            text = "".join(rng.choices(SIGNS, k=rng.randint(0, 7)))
            right = (number for number, pattern in enumerate(patterns) if re.match(pattern, text))
            assert expressions.first(text) == next(right, None), (patterns, text)


@pytest.mark.parametrize(
    "pattern",
    ["(?!a)b", "(?=a)b", "(?<=a)b", "(?<!a)b", r"(a)\1", "(?P<x>a)(?P=x)", "(?i)a", "(?>a)", "a++", "a**", "*a", "(a",
     "a)", "[z-a]", "a{3,2}", "{2}", r"\ba", r"\x61", "[[a]]", "[a--b]", "[a&&b]", "a{x}",
     "[", "a\\", "(" * 50 + ")" * 50,
     "x" * 5000],
)  # fmt: skip
def test_what_no_automaton_matches_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(ModelError, match=r"file: .*(not supported at|more than 4096)"):
        Expressions(["a", pattern], "file")


@pytest.mark.parametrize(
    ("patterns", "text"),
    [
        ([".*.*!"], "a" * 100_000),
        (["(.*){12}!", "(a+)+$", "(.*)(.*)*!"], "a" * 255 + "b"),
        ([f".*{'.*' * n}!" for n in range(200)], "a" * 256),
        ([f"x{n}.*y" for n in range(4096)], "x0" * 128),
        (["(a|b)*a(a|b){2000}"], "abba" * 64),
    ],
)
def test_names_that_python_would_try_for_hours_take_a_moment(patterns: list[str], text: str) -> None:
    assert Expressions(patterns, "file").first(text) is None or patterns == ["(a+)+$"]


@pytest.mark.parametrize(
    "pattern", ["((a{0,9999}){0,9999}){9999}", "(((){9999}a?){9999}){9999}", "(a{999}){999}"]
)
def test_expressions_of_many_states_are_refused(pattern: str) -> None:
    with pytest.raises(ModelError, match="too long or repeat too much"):
        Expressions([pattern], "file")


def test_steps_have_a_budget_over_all_names() -> None:
    rng = random.Random(2)
    expressions = Expressions([f"(.*{rng.choice(SIGNS)}){{2}}.{{{n}}}x" for n in range(99)], "file: ignore")
    with pytest.raises(ModelError, match="file: ignore: its expressions take too long to match"):
        any(expressions.first("".join(rng.choices(SIGNS, k=200))) for _ in range(100_000))


def test_expressions_that_begin_alike_share_their_states() -> None:
    """An adapter may list each of a large model's modules."""
    names = [f"model.layers.{i}.mlp.experts.{j}.up_proj" for i in range(32) for j in range(64)]
    expressions = Expressions([rf"(.*\.)?({name})$" for name in names], "file")
    assert [expressions.first(f"base.{name}") for name in names] == list(range(len(names)))
    assert expressions.first("model.layers.1.mlp.experts.1.up_proj_") is None
