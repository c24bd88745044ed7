"""Patterns of JSON Schema: each has the meaning that ECMA-262 gives it, or is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import RequestError
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.ecma import translate
from quire.params import StructuredOutputsParams
from tests.grammar.test_schema import admits


def allows(compiler: GrammarCompiler, pattern: str, text: str) -> bool:
    schema = {"type": "string", "pattern": pattern}
    return admits(compiler, compiler.check(StructuredOutputsParams(json=json.dumps(schema))), text)


# The right values are those of `new RegExp(pattern, "u")`, or without the flag where that refuses the pattern.
@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"""^[^<>()[\]\\.,;:\s@"]+$""", ["user"], ["a[b", "a]b", "a\\b", "a\u00a0b", 'a"b']),
        (r"^[^[\]]$", ["a", "\\"], ["[", "]"]),
        (r"^[!-/:-@[-`{-~]$", ["!", "[", "`", "~"], ["a", "0"]),
        ("^[[a]]$", ["[]", "a]"], ["a", "[a]"]),
        ("^[a-z--[aeiou]]{3}$", ["a]]]", "-]]]", "[]]]"], ["abc", "a"]),
        ("^[^]a]{2}$", ["xa]]", "\na]]"], ["xx", "x"]),
        ("^[[:alpha:]]$", ["a]", ":]", "[]"], ["a", "b]"]),
        ("^[a&&b~~c]$", ["a", "&", "~"], ["d", ""]),
        ("^{$", ["{"], ["", "{{"]),
        ("^a{,2}$", ["a{,2}"], ["a", "aa"]),
        ("^a{2$", ["a{2"], ["aa"]),
        ("^}]$", ["}]"], ["}"]),
        (r"^\0\cA\x41\u0042\u{43}$", ["\0\x01ABC"], ["ABC"]),
        (r"^[\b\0-\x02]$", ["\b", "\x01"], ["b", "\x03"]),
        ("^[^]$", ["a", "\n"], ["", "ab"]),
        ("x[]|^a$", ["a"], ["x", "b"]),
        (r"^\/\-\_\@$", ["/-_@"], [r"\/"]),
        (r"^\d\D$", ["1٣", "1x"], ["٣x", "12"]),
        (r"^\w\W$", ["aé", "_-"], ["éa", "ab"]),
        (r"^\s\S$", ["\ufeffx", "\u2003x", "\u00a0\u0085"], ["\u0085x", " \ufeff"]),
        (r"^[^\s\d]$", ["a"], [" ", "1"]),
        (r"^[a-\d]$", ["a", "-", "5"], ["b"]),
        ("^.$", ["a", "\u0085", "🙂"], ["\n", "\r", "\u2028"]),
        (r"^\ud83d\ude42{2}$", ["🙂🙂"], ["🙂"]),
        (r"^[\u{1F600}-\u{1F64F}]$", ["🙂"], ["a"]),
        (r"^\p{Lu}\P{L}\p{Script=Greek}$", ["É1α"], ["é1α", "Éaα"]),
        ("^(?<year>[0-9]{4})(?:-(a|b)+?)??$", ["2026", "2026-ab"], ["26", "2026-"]),
        ("^(?i:k(?-i:x))$", ["Kx", "kx"], ["KX"]),
        ("^(?s:.).$", ["\na"], ["a\n"]),
        ("^a|b$", ["ax", "xb"], ["xa", "bx"]),
        ("b", ["abc"], ["ac"]),
    ],
)
def test_meaning(compiler: GrammarCompiler, pattern: str, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not allows(compiler, pattern, text)] == []
    assert [text for text in bad if allows(compiler, pattern, text)] == []


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        ("^(?=.*[A-Z]).+$", "a lookahead"),
        ("a(?!b)", "a lookahead"),
        ("(?<=a)b", "a lookbehind"),
        ("(?<!a)b", "a lookbehind"),
        (r"(a)\1", "a backreference"),
        (r"(?<n>a)\k<n>", "a backreference"),
        (r"\bword\B", "a word boundary"),
        (r"\Aab\z", r"the escape \\A"),
        (r"\Qa\E", r"the escape \\Q"),
        (r"\pL", r"the escape \\p"),
        (r"\p{^L}", r"the escape \\p"),
        (r"\p{IsGreek}", "the property IsGreek"),
        (r"\c1\u12", r"the escape \\c"),
        ("(?P<n>a)", "a group"),
        ("(?i)a", "a group"),
        ("(?>a)", "a group"),
        ("a++", "nothing to repeat"),
        ("a**", "nothing to repeat"),
        ("^*", "nothing to repeat"),
        ("{2}", "nothing to repeat"),
        ("a{3,2}", "out of order"),
        ("a{12345678}", "six digits"),
        ("[z-a]", "out of order"),
        (r"[\ud83d]", "half of a surrogate pair"),
        (r"\u{110000}", "a code point above"),
        ("(a", "without its"),
        ("a)", "without its"),
        ("[a", "without its"),
        ("(" * 2000, "nested"),
        ("a\\", "the escape"),
    ],
)
def test_refused(pattern: str, what: str) -> None:
    with pytest.raises(RequestError, match=what):
        translate(pattern)


@pytest.mark.parametrize(
    "place",
    [
        lambda p: {"patternProperties": {p: True}},
        lambda p: {"propertyNames": {"pattern": p}},
        lambda p: {"properties": {"pattern": {"pattern": p}}},
        lambda p: {"not": {"pattern": p}},
        lambda p: {"anyOf": [{"items": {"pattern": p}}]},
        lambda p: {"$ref": "#/elsewhere/x", "elsewhere": {"x": {"pattern": p}}},
    ],
)
def test_places(compiler: GrammarCompiler, place: Any) -> None:
    with pytest.raises(RequestError, match="a lookahead"):
        compiler.check(StructuredOutputsParams(json=json.dumps(place("(?=a)"))))


@pytest.mark.parametrize("place", ["const", "default", "examples", "x-elsewhere"])
def test_what_is_no_schema_has_no_pattern(compiler: GrammarCompiler, place: str) -> None:
    schema = {"properties": {"a": {place: {"pattern": "(?=a)", "properties": "x"}}}}
    compiler.check(StructuredOutputsParams(json=json.dumps(schema)))


PIECES = st.sampled_from(
    [*"ab-.|*+?2,", "(a|b)", "(?:b)", "[a-b]", "[^a]", "[^b-]", r"\d", r"\.", r"\-", r"\n", "{2}", "{1,2}"]
)


@settings(max_examples=300)
@given(
    pieces=st.lists(PIECES, min_size=1, max_size=6),
    whole=st.booleans(),
    texts=st.lists(st.text("ab-.2,\n", max_size=4), max_size=4),
)
def test_equals_python_where_the_languages_agree(
    compiler: GrammarCompiler, pieces: list[str], whole: bool, texts: list[str]
) -> None:
    """Leave out Python's own: its `$` and possessive quantifiers."""
    inner = "".join(pieces)
    if re.search(r"[*+?}][*+]", inner):
        return
    try:
        oracle = re.compile(rf"^(?:{inner})\Z" if whole else inner)
    except re.error:
        with pytest.raises(RequestError):
            translate(inner)
        return
    pattern = f"^(?:{inner})$" if whole else inner
    found = [text for text in texts if allows(compiler, pattern, text)]
    assert found == [text for text in texts if oracle.search(text)]
