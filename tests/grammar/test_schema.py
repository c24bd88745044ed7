"""Rewritten schemas: whatever the compiler lets through is valid under the schema as it was given."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import RequestError
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.negation import Negation, other_texts
from quire.grammar.schema import prepare_schema
from quire.params import StructuredOutputsParams
from tests.grammar.conftest import END, encode
from tests.grammar.test_matcher import allowed

# A known difference of the compiler's own: a base URI beside a reference.
KNOWN = {"$ref prevents a sibling $id from changing the base uri"}
# Keywords that validators take as annotations unless they are told otherwise.
ANNOTATIONS = {"content.json"}


def admits(compiler: GrammarCompiler, text: str, data: Any) -> bool:
    """Whether `data`, written without whitespace, is an output."""
    matcher = compiler.compile(text).matcher()
    written = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    for token in encode(written):
        if matcher.ended or token not in allowed(matcher):
            return False
        if matcher.forced and matcher.forced[0] != token:
            return False
        matcher.advance(token)
    return matcher.ended or END in allowed(matcher)


def compiled(compiler: GrammarCompiler, schema: Any) -> str | None:
    try:
        return compiler.check(StructuredOutputsParams(json=json.dumps(schema)))
    except RequestError:
        return None


TEXT = {"type": "string"}
PAIR = {"type": "object", "properties": {"a": TEXT, "b": TEXT}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"not": {"type": "string"}}, [1, None, []], ["x"]),
        ({"type": "string", "not": {"enum": ["ab", "abc", ""]}}, ["a", "abcd", "b"], ["ab", "abc", ""]),
        ({"type": "integer", "not": {"minimum": 5}}, [4, -1], [5]),
        ({**PAIR, "not": {"required": ["a", "b"]}}, [{}, {"a": "x"}, {"b": "x"}], [{"a": "x", "b": "y"}]),
        (
            {**PAIR, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
            [{"a": ""}],
            [{}, {"a": "", "b": ""}],
        ),
        ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 3}]}, [2], [5, 2.5]),
        (
            {
                "oneOf": [
                    {"type": "object", "properties": {n: TEXT}, "additionalProperties": False} for n in "ab"
                ]
            },
            [{"a": "x"}, {"b": "x"}],
            [{}, {"a": "x", "b": "y"}],
        ),
        ({**PAIR, "dependentRequired": {"a": ["b"]}}, [{}, {"b": ""}, {"a": "", "b": ""}], [{"a": ""}]),
        ({**PAIR, "dependencies": {"a": {"required": ["b"]}}}, [{"b": ""}], [{"a": ""}]),
        (
            {"if": {"type": "integer"}, "then": {"minimum": 3}, "else": {"type": "string"}},
            [3, "x"],
            [2, None],
        ),
        ({"type": "array", "contains": {"const": 1}, "items": {"type": "integer"}}, [[1], [1, 2]], [[], [2]]),
        ({"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True}, [[], [1, 3], [2]], [[1, 1]]),
        ({"type": "array", "items": TEXT, "uniqueItems": True}, [[], ["a"]], [["a", "a"]]),
        ({"type": "array", "items": TEXT, "uniqueItems": False}, [["a", "a"]], [[1]]),
        ({"type": "object", "propertyNames": {"pattern": "^x"}}, [{"x1": 1}], [{"y": 1}]),
        ({"type": "object", "propertyNames": {"enum": ["a.b", "c"]}}, [{"a.b": 1}], [{"axb": 1}]),
        ({**PAIR, "minProperties": 1}, [{"a": ""}, {"a": "", "b": ""}], [{}]),
        ({**PAIR, "maxProperties": 1, "minProperties": 1}, [{"a": ""}], [{}, {"a": "", "b": ""}]),
        ({"format": "date"}, ["2024-02-28", 5], ["2023-02-29", "0000-01-01"]),
        ({"type": "string", "format": "date-time"}, ["2024-12-31T23:59:59Z"], ["2024-12-31T23:59:60Z", "x"]),
        ({"type": "string", "format": "no-such-format"}, ["anything"], [1]),
        ({"type": "string", "format": "regex"}, ["abc"], ["("]),
        (
            {"oneOf": [{"$ref": "#/$defs/n"}, {"type": "null"}], "$defs": {"n": {"type": "integer"}}},
            [1, None],
            ["a"],
        ),
        (
            {"properties": {"next": {"$ref": "#"}}, "required": [], "type": "object"},
            [{"next": {"next": {}}}],
            [3],
        ),
    ],
)
def test_keywords(compiler: GrammarCompiler, schema: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    text = compiler.check(StructuredOutputsParams(json=schema))
    checks = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.FormatChecker(["date", "regex"])
    )
    for data in good:
        assert checks.is_valid(data), data
        assert admits(compiler, text, data), data
    for data in bad:
        assert not admits(compiler, text, data), data


def test_what_has_no_other_words_is_refused_by_name(compiler: GrammarCompiler) -> None:
    for schema, name in (
        ({"type": "string", "not": {"pattern": "a"}}, "not"),
        ({"type": "array", "items": TEXT, "uniqueItems": True, "minItems": 2}, "uniqueItems"),
        ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    ):
        with pytest.raises(RequestError, match=f"not supported: .*{name}"):
            compiler.check(StructuredOutputsParams(json=schema))
    with pytest.raises(RequestError, match="deep"):
        prepare_schema(json.loads('{"not":' * 300 + "{}" + "}" * 300))


def test_closed_objects_have_no_other_properties(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a": TEXT}}
    opened = compiler.check(StructuredOutputsParams(json=schema))
    closed = compiler.check(StructuredOutputsParams(json=schema, disable_additional_properties=True))
    assert admits(compiler, opened, {"a": "", "b": 1})
    assert not admits(compiler, closed, {"a": "", "b": 1})
    assert admits(compiler, closed, {"a": ""})


@given(texts=st.lists(st.text("abé.", max_size=4), min_size=1, max_size=5), other=st.text("abé.", max_size=5))
def test_all_other_texts(texts: list[str], other: str) -> None:
    pattern = re.sub(r"\\x\{([0-9a-f]+)\}", lambda m: re.escape(chr(int(m[1], 16))), other_texts(texts))
    assert bool(re.fullmatch(pattern, other)) == (other not in texts)


VALUES = st.recursive(
    st.one_of(st.integers(-3, 3), st.sampled_from(["", "a", "ab"]), st.booleans(), st.none(), st.just(1.5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2)
    ),
    max_leaves=4,
)
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
CONDITIONS = st.recursive(
    st.one_of(
        st.builds(lambda t: {"type": t}, TYPES),
        st.builds(lambda a, b: {"type": [a, b]}, TYPES, TYPES),
        st.builds(lambda v: {"enum": v}, st.lists(VALUES, min_size=1, max_size=3)),
        st.builds(lambda n: {"minimum": n}, st.integers(-3, 3)),
        st.builds(lambda n: {"maxLength": n}, st.integers(0, 3)),
        st.builds(lambda n: {"required": n}, st.lists(st.sampled_from(["a", "b"]), max_size=2, unique=True)),
        st.just({"properties": {"a": {}}, "additionalProperties": False}),
        st.booleans(),
    ),
    lambda inner: st.one_of(
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
        st.builds(lambda a, b: {"oneOf": [a, b]}, inner, inner),
        st.builds(lambda a, b: {"allOf": [a, b]}, inner, inner),
        st.builds(lambda a: {"not": a}, inner),
        st.builds(lambda a: {"properties": {"a": a}}, inner),
        st.builds(lambda a, b: {"if": a, "then": b}, inner, inner),
    ),
    max_leaves=5,
)


@settings(max_examples=400)
@given(schema=CONDITIONS, value=VALUES)
def test_negations_exclude_what_they_negate(schema: Any, value: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    for brief in (False, True):
        opposite = Negation({}, brief).of(schema, names=["a", "b"])
        if opposite is not None and jsonschema.Draft202012Validator(opposite).is_valid(value):
            assert not jsonschema.Draft202012Validator(schema).is_valid(value)


@settings(max_examples=400)
@given(schema=CONDITIONS, value=VALUES)
def test_rewritten_schemas_allow_no_more(schema: Any, value: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    for effort in (0, 1, 2):
        prepared = prepare_schema(schema, effort=effort)
        if jsonschema.Draft202012Validator(prepared).is_valid(value):
            assert jsonschema.Draft202012Validator(schema).is_valid(value)


KEYWORDS = re.findall(
    r"[$\w]+",
    "type enum const properties required not oneOf anyOf allOf if then else items contains uniqueItems minItems "
    "maxItems minProperties maxProperties propertyNames dependencies $ref format minLength dependentRequired "
    "minContains additionalProperties patternProperties $schema",
)
JUNK = st.recursive(
    st.one_of(VALUES, st.sampled_from(["#", "#/x", "date", "object", "string"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(KEYWORDS),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)


@settings(max_examples=400)
@given(schema=JUNK)
def test_junk_is_refused_and_breaks_nothing(compiler: GrammarCompiler, schema: Any) -> None:
    compiled(compiler, schema)
    assert compiled(compiler, TEXT)


def suite(data: Path) -> Iterator[tuple[str, Any]]:
    """The groups of the official test suite of JSON Schema."""
    for draft in ("draft7", "draft2019-09", "draft2020-12"):
        for path in sorted((data / "struct-json-schema-test-suite/tests" / draft).rglob("*.json")):
            if path.name not in ANNOTATIONS:
                for group in json.loads(path.read_text()):
                    if group["description"] not in KNOWN:
                        yield path.name, group


@pytest.mark.slow
def test_the_official_suite(compiler: GrammarCompiler, data: Path) -> None:
    """No instance that is invalid can be written; formats count as assertions."""
    groups = accepted = 0
    for name, group in suite(data):
        groups += 1
        text = compiled(compiler, group["schema"])
        if text is None:
            continue
        accepted += 1
        for case in group["tests"]:
            if not case["valid"]:
                where = f"{name}: {group['description']}: {case['description']}"
                assert not admits(compiler, text, case["data"]), where
    assert accepted > 0.65 * groups


@pytest.mark.slow
def test_real_schemas(compiler: GrammarCompiler, data: Path) -> None:
    """Of a sample of JSONSchemaBench at least 93% are accepted, and no invalid instance can be written."""
    total = accepted = 0
    for path in sorted((data / "struct-jsonschemabench").glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in list(lines)[::6]:
                row = json.loads(line)
                total += 1
                text = compiled(compiler, row["schema"])
                if text is not None:
                    accepted += 1
                    for case in row["tests"]:
                        short = len(json.dumps(case["data"])) < 4000
                        assert case["valid"] or not short or not admits(compiler, text, case["data"]), row[
                            "id"
                        ]
    assert accepted > 0.93 * total
