"""What may come next, for every kind of constraint, and that jumping over forced text changes nothing."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import RequestError
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.matcher import GrammarError, Matcher
from quire.params import StructuredOutputsParams
from tests.grammar.conftest import CALL, END, PIECES, decode, encode

WORDS = (len(PIECES) + 31) // 32


def matcher_of(compiler: GrammarCompiler, honour_ends: bool = True, **constraint: Any) -> Matcher:
    text = compiler.check(StructuredOutputsParams(**constraint))
    return compiler.compile(text).matcher(honour_ends)


def allowed(matcher: Matcher) -> list[int]:
    mask = np.zeros(WORDS, np.uint32)
    matcher.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def accepts(matcher: Matcher, tokens: list[int]) -> bool:
    """Whether the tokens are a whole output."""
    for token in tokens:
        if matcher.ended or token not in allowed(matcher):
            return False
        matcher.advance(token)
    return matcher.ended or END in allowed(matcher)


def draw(matcher: Matcher, rng: np.random.Generator, limit: int, jumps: bool) -> list[int]:
    """A random output; noise is by position, so that it does not depend on the way that led there."""
    noise = rng.random((limit, len(PIECES)))
    noise[:, [PIECES.index(p) for p in (b'"', b"}", b"]", b'"}')]] += 0.7  # so that most end
    output: list[int] = []
    while not matcher.ended and len(output) < limit:
        ids = allowed(matcher)
        token = ids[int(np.argmax(noise[len(output)][ids]))]
        output.append(token)
        if token == END:
            break
        matcher.advance(token)
        if jumps:
            output += matcher.jump(limit - len(output), frozenset([END]))
    return output


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_json_schema_allows_its_instances_alone(compiler: GrammarCompiler) -> None:
    good = encode('{"name":"abc","age":-3}')
    assert accepts(matcher_of(compiler, json=SCHEMA), good)
    assert accepts(matcher_of(compiler, json=json.dumps(SCHEMA)), good)
    for bad in (
        '{"name":"abc"}',
        '{"age":3,"name":"a"}',
        '{"name":"a","age":3.5}',
        "[]",
        '{"name": "a","age":1}',
    ):
        assert not accepts(matcher_of(compiler, json=SCHEMA), encode(bad)), bad


def test_whitespace_is_written_only_where_asked_for(compiler: GrammarCompiler) -> None:
    spaced = encode('{"name": "a", "age": 1}')
    assert not accepts(matcher_of(compiler, json=SCHEMA), spaced)
    assert accepts(matcher_of(compiler, json=SCHEMA, whitespace_pattern=" ?"), spaced)
    assert accepts(matcher_of(compiler, json=SCHEMA, disable_any_whitespace=False), spaced)


def test_end_comes_only_where_the_grammar_may_end(compiler: GrammarCompiler) -> None:
    matcher = matcher_of(compiler, regex="a+b?")
    assert END not in allowed(matcher)
    matcher.advance(ord("a"))
    assert END in allowed(matcher)
    matcher.advance(ord("b"))
    assert matcher.ended
    endless = matcher_of(compiler, honour_ends=False, regex="a+")
    endless.advance(ord("a"))
    assert END not in allowed(endless)


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        ({"regex": r"\d{3}-[a/]+"}, "123-a/a", "12-a"),
        ({"regex": "^(abc|true)$"}, "true", "truest"),
        ({"choice": ["yes", "no", 'with "quotes"\n']}, 'with "quotes"\n', "maybe"),
        ({"choice": ["no", "no way"]}, "no way", "no w"),
        ({"grammar": 'root ::= item ("," item)*\nitem ::= "ab" | [0-9]+'}, "ab,12,3", "ab,"),
        ({"grammar": 'start: "a" start "b" | "ab"'}, "aaabbb", "aab"),
        ({"json_object": True}, '{"any":[1,null]}', "[1]"),
        ({"json": True}, "[1]", "nope"),
        ({"json": {"enum": ["é", 1]}}, '"é"', '"e"'),
    ],
)
def test_kinds(compiler: GrammarCompiler, constraint: dict[str, Any], good: str, bad: str) -> None:
    assert accepts(matcher_of(compiler, **constraint), encode(good))
    assert not accepts(matcher_of(compiler, **constraint), encode(bad))


OLDER = {
    "type": "structural_tag",
    "triggers": ["<tool="],
    "structures": [
        {"begin": "<tool=f>", "schema": {"enum": [1]}, "end": "</tool>"},
        {"begin": "<tool=g>", "schema": {"enum": [2]}, "end": "</tool>"},
    ],
}
REQUIRED = {
    "type": "triggered_tags",
    "triggers": ["<|call|>"],
    "at_least_one": True,
    "stop_after_first": True,
    "tags": [
        {"type": "tag", "begin": "<|call|>f(", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": ")"}
    ],
}
THINK = {
    "type": "sequence",
    "elements": [
        {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
        {"type": "optional", "content": {"type": "const_string", "value": "\n"}},
        {
            "type": "or",
            "elements": [
                {"type": "json_schema", "json_schema": {"enum": [7]}},
                {"type": "grammar", "grammar": 'root ::= "ab"'},
            ],
        },
    ],
}
LISTED = {
    "type": "tags_with_separator",
    "separator": ";",
    "at_least_one": True,
    "tags": [
        {
            "type": "tag",
            "begin": "(",
            "content": {"type": "json_schema", "json_schema": {"enum": [1]}},
            "end": [")", "]"],
        }
    ],
}


def with_calls(text: str) -> list[int]:
    head, *rest = text.split("<|call|>")
    tokens = encode(head)
    for part in rest:
        tokens += [CALL, *encode(part)]
    return tokens


@pytest.mark.parametrize(
    ("tag", "good", "bad"),
    [
        (OLDER, "hello <tool=f>1</tool> and <tool=g>2</tool>.", "hello <tool=f>2</tool>"),
        (OLDER, "no tool at all < tool", "a <tool=h>"),
        ({"format": REQUIRED}, "text first <|call|>f(12)", "text alone"),
        ({"format": REQUIRED}, "<|call|>f(1)", "<|call|>f()"),
        ({"format": THINK}, "<think>so < so</think>7", "<think>so</think>8"),
        ({"format": THINK}, "<think></think>\nab", "ab"),
        ({"format": LISTED}, "(1);(1]", "(1);"),
    ],
)
def test_structural_tags(compiler: GrammarCompiler, tag: dict[str, Any], good: str, bad: str) -> None:
    assert accepts(matcher_of(compiler, structural_tag=tag), with_calls(good))
    assert not accepts(matcher_of(compiler, structural_tag=tag), with_calls(bad))


def test_free_text_never_holds_a_special_token(compiler: GrammarCompiler) -> None:
    assert CALL not in allowed(matcher_of(compiler, structural_tag=OLDER))
    assert CALL in allowed(matcher_of(compiler, structural_tag={"format": REQUIRED}))


def test_forced_text_is_canonical_and_masked_alike(compiler: GrammarCompiler) -> None:
    matcher = matcher_of(compiler, json=SCHEMA)
    assert matcher.forced
    assert allowed(matcher) == [matcher.forced[0]]
    assert list(matcher.forced) == encode('{"name":"')[: len(matcher.forced)]
    before = list(matcher.forced)
    assert matcher.jump(1, frozenset()) == before[:1]
    assert matcher.jump(99, frozenset([before[2]])) == before[1:2]
    with pytest.raises(GrammarError, match="forces"):
        matcher.advance(before[2] + 1)


def test_masks_ahead_of_drafts_leave_the_state(compiler: GrammarCompiler) -> None:
    matcher = matcher_of(compiler, json=SCHEMA)
    matcher.jump(99, frozenset())
    drafts = encode('"a","age":5}')
    masks = np.zeros((len(drafts) + 1, WORDS), np.uint32)
    filled = matcher.fill_ahead(drafts, masks)
    assert filled == len(drafts)  # after the last one nothing may come
    plain = matcher_of(compiler, json=SCHEMA)
    plain.jump(99, frozenset())
    mask = np.zeros(WORDS, np.uint32)
    for i, draft in enumerate(drafts):
        plain.fill(mask)
        assert np.array_equal(mask, masks[i])
        plain.advance(draft)
    assert plain.ended
    assert not matcher.ended
    wrong = encode('"a"!!')
    assert matcher.fill_ahead(wrong, masks) == 4
    assert accepts(matcher, drafts)


SCHEMAS = st.recursive(
    st.one_of(
        st.just({"type": "integer", "minimum": -5, "maximum": 300}),
        st.just({"type": "boolean"}),
        st.just({"type": "string", "maxLength": 4}),
        st.just({"type": "string", "pattern": "^[a-c]{1,3}$"}),
        st.just({"enum": ["name", 1, None, {"a": [True]}]}),
        st.just({"type": "null"}),
    ),
    lambda inner: st.one_of(
        st.builds(lambda s: {"type": "array", "items": s, "maxItems": 2}, inner),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
        st.builds(
            lambda names, s, required: {
                "type": "object",
                "properties": dict.fromkeys(names, s),
                "required": [n for n in names if n in required],
                "additionalProperties": False,
            },
            st.lists(st.sampled_from(["name", "age", "é", "a b"]), min_size=1, max_size=3, unique=True),
            inner,
            st.sets(st.sampled_from(["name", "age", "é", "a b"])),
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=60)
@given(schema=SCHEMAS, seed=st.integers(0, 1 << 30))
def test_random_outputs_are_valid_and_jumping_changes_nothing(
    compiler: GrammarCompiler, schema: dict[str, Any], seed: int
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    outputs = [
        draw(matcher_of(compiler, json=schema), np.random.default_rng(seed), 200, jumps)
        for jumps in (True, False)
    ]
    assert outputs[0] == outputs[1]
    again = matcher_of(compiler, json=schema)
    for token in outputs[0]:
        if token != END:
            again.advance(token)
    finished = again.ended or outputs[0][-1] == END
    if finished:
        text = decode([t for t in outputs[0] if t != END])
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        ({"json": "{"}, "not valid JSON"),
        ({"json": "[1]"}, "object or a boolean"),
        ({"json": "[" * 100_000}, "not valid JSON"),
        ({"json": {"type": "objet"}}, "not valid"),
        ({"json": {"$ref": "#/nope"}}, "/nope"),
        ({"json": {"type": "string", "pattern": "("}}, "not valid"),
        ({"regex": "[a"}, "unclosed character class"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"regex": "(" * 5000 + "a" + ")" * 5000}, "not valid"),
        ({"grammar": "what is this"}, "neither EBNF nor Lark"),
        ({"grammar": 'start: other\n"'}, "not valid"),
        ({"structural_tag": {"type": "structural_tag"}}, "structures must be a list"),
        ({"structural_tag": {"format": {"type": "dance"}}}, "'dance' is not supported"),
        ({"structural_tag": {"format": {**REQUIRED, "triggers": ["x"]}}}, "none of the triggers"),
    ],
)
def test_bad_constraints_are_refused_with_the_reason(
    compiler: GrammarCompiler, constraint: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        compiler.check(StructuredOutputsParams(**constraint))
    assert caught.value.param == "structured_outputs"
    assert len(str(caught.value)) < 1000


def test_one_constraint_and_no_more() -> None:
    with pytest.raises(RequestError, match="both json and regex"):
        StructuredOutputsParams(json={}, regex="a")
    with pytest.raises(RequestError, match="names none"):
        StructuredOutputsParams()
    with pytest.raises(RequestError, match="names none"):
        StructuredOutputsParams(json_object=False)
    with pytest.raises(RequestError, match="select"):
        StructuredOutputsParams(regex="a", select=True)
    with pytest.raises(RequestError, match="regex must be"):
        StructuredOutputsParams(regex="a" * 2_000_000)
    with pytest.raises(RequestError, match="choice"):
        StructuredOutputsParams(choice=[])


def test_owners_take_turns_at_the_compiler(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins, order = threading.Event(), list[str]()

    def compile_one(text: str) -> None:
        assert begins.wait(60)
        order.append(text)
        if text == "m2":
            raise RequestError("refused")

    monkeypatch.setattr(compiler, "compile", compile_one)
    jobs = [compiler.submit(f"m{i}", "many") for i in range(4)]
    jobs += [compiler.submit("o", "one"), compiler.submit("t", "two")]
    begins.set()
    with pytest.raises(RequestError, match="refused"):
        jobs[2].result(60)
    for job in (jobs[0], jobs[1], *jobs[3:]):
        job.result(60)
    assert order == ["m0", "o", "t", "m1", "m2", "m3"]


def test_compiled_grammars_are_kept(compiler: GrammarCompiler) -> None:
    text = compiler.text(StructuredOutputsParams(regex="kept"))
    first = compiler.compile(text)
    assert compiler.compile(text) is first
    assert compiler.submit(text).result() is first
    for i in range(70):
        compiler.compile(compiler.text(StructuredOutputsParams(regex=f"other{i}")))
    assert compiler.find(text) is None
