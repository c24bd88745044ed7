"""The bound on reasoning: when it counts, what it forces, and that masks ahead of drafts are those step by step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.grammar.budget import BudgetMatcher
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.matcher import GrammarError, Matcher
from quire.grammar.vocabulary import Vocabulary
from quire.params import StructuredOutputsParams
from quire.types import ThinkingBudget
from tests.grammar.conftest import CALL, PIECES, decode, encode

WORDS = (len(PIECES) + 31) // 32
END = encode("</t>")


def budget(limit: int, opened: bool = True, end: tuple[str, ...] = ("</t>",)) -> ThinkingBudget:
    return ThinkingBudget(limit, ("<t>",), end, opened)


def made(
    vocabulary: Vocabulary, limit: int, opened: bool = True, inner: Matcher | None = None
) -> BudgetMatcher:
    return BudgetMatcher(budget(limit, opened), vocabulary, inner)


def say(matcher: BudgetMatcher, text: str) -> str:
    """What comes out if the model wants to say `text` forever."""
    wanted, out = encode(text), list[int]()
    for i in range(40):
        mask = np.zeros(WORDS, np.uint32)
        matcher.fill(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        token = wanted[i % len(wanted)]
        token = token if token in allowed else int(allowed[0])
        matcher.advance(token)
        out.append(token)
    return decode(out)


@pytest.mark.parametrize("limit", [0, 1, 5, 12])
def test_reasoning_is_ended_after_so_many_tokens(vocabulary: Vocabulary, limit: int) -> None:
    text = say(made(vocabulary, limit), "x")
    assert text == "x" * limit + "</t>" + "x" * (40 - limit - len(END))


def test_what_ends_itself_is_left_alone(vocabulary: Vocabulary) -> None:
    text = "xx</t>yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy"
    assert text.startswith(say(made(vocabulary, 20), text))


def test_reasoning_that_the_output_begins_counts_from_there(vocabulary: Vocabulary) -> None:
    assert say(made(vocabulary, 3, opened=False), "ab<t>" + "x" * 40).startswith("ab<t>xxx</t>")
    assert say(made(vocabulary, 3, opened=False), "y") == "y" * 40
    again = "<t>xx</t>y<t>" + "x" * 40  # the bound is on all of it
    assert say(made(vocabulary, 3, opened=False), again).startswith("<t>xx</t>y<t></t>x")


def test_an_end_may_be_a_special_token(vocabulary: Vocabulary) -> None:
    matcher = BudgetMatcher(budget(2, end=("<|call|>",)), vocabulary, None)
    for token in encode("xy"):
        matcher.advance(token)
    with pytest.raises(GrammarError, match="ends the reasoning"):
        matcher.advance(encode("z")[0])
    assert list(matcher.forced) == vocabulary.encode("<|call|>")
    early = BudgetMatcher(budget(2, end=("<|call|>",)), vocabulary, None)
    early.advance(CALL)
    assert not early.forced


def test_the_grammar_of_the_answer_follows(vocabulary: Vocabulary, compiler: GrammarCompiler) -> None:
    form = {
        "type": "sequence",
        "elements": [
            {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</t>"},
            {"type": "regex", "pattern": "[ab]{4}"},
        ],
    }
    tag = StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": form})
    matcher = made(vocabulary, 3, inner=compiler.compile(compiler.check(tag)).matcher())
    for token in encode("xyz"):
        matcher.advance(token)
    assert matcher.jump(10, frozenset()) == END
    mask = np.zeros(WORDS, np.uint32)
    matcher.fill(mask)
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    assert {decode([token]) for token in allowed} == {"a", "b", "ab"}


@settings(max_examples=60, deadline=None)
@given(
    limit=st.integers(0, 6),
    opened=st.booleans(),
    text=st.lists(st.sampled_from(["x", "<t>", "</t>", "<", "t", ">", "/"]), max_size=8).map("".join),
)
def test_masks_ahead_are_those_step_by_step(
    vocabulary: Vocabulary, limit: int, opened: bool, text: str
) -> None:
    drafts = encode(text)
    ahead, steps = made(vocabulary, limit, opened), made(vocabulary, limit, opened)
    masks = np.zeros((len(drafts) + 1, WORDS), np.uint32)
    rows = ahead.fill_ahead(drafts, masks)
    allowed = ahead.count_allowed(drafts)
    assert rows == allowed + 1
    for row in range(rows):
        mask = np.zeros(WORDS, np.uint32)
        steps.fill(mask)
        assert (masks[row] == mask).all()
        if row < allowed:
            steps.advance(drafts[row])
