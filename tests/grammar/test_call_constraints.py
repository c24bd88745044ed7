"""Constraints for tool calls: whatever they let through is read back as calls that are valid under their schemas."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest

from quire.grammar.compiler import GrammarCompiler
from quire.params import StructuredOutputsParams
from quire.text.formats.registry import TOOL_FORMATS, reasoning_format, tool_format
from quire.text.output.constraint import after_reasoning, as_answer, form_of, free_with_calls, required_calls
from quire.text.output.parser import parse
from tests.grammar.conftest import PIECES, decode, encode
from tests.grammar.test_matcher import accepts, draw, matcher_of

FUNCTIONS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "units": {"enum": ["metric", "imperial"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "where": {"$ref": "#/$defs/place"},
            "exact": {"type": "boolean"},
            "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
            "date": {"type": "string", "format": "date"},
        },
        "required": ["days", "where"],
        "$defs": {"place": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}},
    },
    "clock": {"type": "object", "properties": {"zone": {"type": "string", "minLength": 1, "maxLength": 3}}},
    "dice": {},
}
OFFERED = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in FUNCTIONS.items()]
NAMES = TOOL_FORMATS


def tag(form: dict[str, Any]) -> dict[str, Any]:
    return {"structural_tag": {"type": "structural_tag", "format": form}}


def check_calls(name: str, text: str) -> int:
    parsed = parse(text, name, functions=OFFERED)
    assert parsed.content == "", text
    assert parsed.calls
    for call in parsed.calls:
        assert call.complete, text
        jsonschema.validate(json.loads(call.arguments), FUNCTIONS[call.name])
        assert set(json.loads(call.arguments)) <= set(FUNCTIONS[call.name].get("properties", {}))
    return len(parsed.calls)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("parallel", [True, False])
def test_what_is_required_is_read_back(compiler: GrammarCompiler, name: str, parallel: bool) -> None:
    form = required_calls(tool_format(name), FUNCTIONS, parallel)
    finished = 0
    for seed in range(8):
        tokens = draw(matcher_of(compiler, **tag(form)), np.random.default_rng(seed), 500, jumps=True)
        if len(tokens) == 500:
            continue  # many calls, or a long text, not yet at its end
        finished += 1
        text = decode([t for t in tokens if PIECES[t] != b"<eos>"])
        num_calls = check_calls(name, text)
        assert num_calls == 1 or parallel
    assert finished


STRUCTURE = {"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}
CALLS = {
    "hermes": '<tool_call>\n{"name": "clock", "arguments": {"zone":"ab"}}\n</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "clock", "arguments": {"zone":"ab"}}]',
    "mistral_v11": '[TOOL_CALLS]clock[ARGS]{"zone":"ab"}',
    "llama3_json": '{"name": "clock", "parameters": {"zone":"ab"}}',
    "pythonic": '[clock(zone="ab")]',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>"
    '{"zone":"ab"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="clock">\n<｜DSML｜parameter name="zone" '
    'string="true">ab</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.clock:0<|tool_call_argument_begin|>"
    '{"zone":"ab"}<|tool_call_end|><|tool_calls_section_end|>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="clock" index="1"<|sep|><|open|>argument key="zone" type="string"'
    "<|sep|>ab<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
    "minimax_m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="clock">]<]minimax[>[<zone>ab'
    "]<]minimax[>[</zone>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    "gemma4": '<|tool_call>call:clock{zone:<|"|>ab<|"|>}<tool_call|>',
    "cohere_command3": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "clock", "parameters": {"zone":"ab"}}]'
    "<|END_ACTION|>",
    "apertus": '<|tools_prefix|>[{"clock": {"zone":"ab"}}]<|tools_suffix|>',
    "nemotron": '<TOOLCALL>[{"name": "clock", "arguments": {"zone":"ab"}}]</TOOLCALL>',
    "olmo3": '<function_calls>\nclock(zone="ab")\n</function_calls>',
    "xlam": '[{"name": "clock", "arguments": {"zone":"ab"}}]',
    "minicpm5": '<function name="clock"><param name="zone">ab</param></function>',
    "gigachat3": 'function call<|role_sep|>\n{"name": "clock", "arguments": {"zone":"ab"}}<|message_sep|>',
    "step3": '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="clock">'
    '<steptml:parameter name="zone">ab</steptml:parameter></steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>',
    "qwen3_coder": "<tool_call>\n<function=clock>\n<parameter=zone>\nab\n</parameter>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("name", CALLS)
def test_free_text_with_valid_calls(compiler: GrammarCompiler, name: str) -> None:
    form = free_with_calls(tool_format(name), FUNCTIONS, True)

    def may_be(text: str) -> bool:
        return accepts(matcher_of(compiler, **tag(form)), encode(text))

    assert may_be("Just words, and 1 < 2 [a].")
    assert may_be(f"Let me look. {CALLS[name]}")
    assert parse(f"Let me look. {CALLS[name]}", name, functions=OFFERED).calls[0].name == "clock"
    assert not may_be(CALLS[name].replace("ab", "much too long"))
    assert not may_be(CALLS[name].replace("zone", "zona"))


def test_free_text_with_recipients(compiler: GrammarCompiler) -> None:
    form = free_with_calls(tool_format("functionary_v32"), FUNCTIONS, True)
    for text, fits in (("all\nNoon.", True), ('clock\n{"zone":"ab"}', True), ("Noon.", False)):
        assert accepts(matcher_of(compiler, **tag(form)), encode(text)) is fits, text


def test_free_text_in_an_answer_with_markers(compiler: GrammarCompiler) -> None:
    reasoning = reasoning_format("cohere_command3")
    form = free_with_calls(tool_format("cohere_command3"), FUNCTIONS, True, reasoning)
    for text in ("Noon.", "<|START_RESPONSE|>Noon.<|END_RESPONSE|>", CALLS["cohere_command3"]):
        assert accepts(matcher_of(compiler, **tag(form)), encode(text)), text


def test_arguments_are_always_an_object(compiler: GrammarCompiler) -> None:
    schema = {"properties": {"sides": {"enum": [6, 20]}}, "required": ["sides"]}
    form = required_calls(tool_format("hermes"), {"roll": schema}, False)
    begin, end = '<tool_call>\n{"name": "roll", "arguments": ', "}\n</tool_call>"
    for arguments, fits in (('{"sides":6}', True), ('"six"', False), ("{}", False), ("[]", False)):
        text = begin + arguments + end
        assert accepts(matcher_of(compiler, **tag(form)), encode(text)) is fits, text


NESTED = {
    "type": "object",
    "properties": {
        "to": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "name": {"type": "string"}},
            "required": ["x"],
        },
        "via": {"type": "array", "items": {"enum": ["air", "sea"]}},
    },
    "required": ["to", "via"],
}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "gemma4",
            '<|tool_call>call:go{to:{x:1,name:<|"|>Rome<|"|>},via:[<|"|>air<|"|>,<|"|>sea<|"|>]}<tool_call|>',
        ),
        (
            "minimax_m3",
            ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="go">]<]minimax[>[<to>]<]minimax[>[<x>1'
            "]<]minimax[>[</x>]<]minimax[>[<name>Rome]<]minimax[>[</name>]<]minimax[>[</to>]<]minimax[>[<via>]<]minimax[>[<item>air"
            "]<]minimax[>[</item>]<]minimax[>[<item>sea]<]minimax[>[</item>]<]minimax[>[</via>]<]minimax[>[</invoke>\n"
            "]<]minimax[>[</tool_call>",
        ),
    ],
)
def test_nested_arguments_in_the_format_s_own_syntax(compiler: GrammarCompiler, name: str, text: str) -> None:
    form = required_calls(tool_format(name), {"go": NESTED}, False)
    assert accepts(matcher_of(compiler, **tag(form)), encode(text))
    assert not accepts(matcher_of(compiler, **tag(form)), encode(text.replace("sea", "rail")))
    offered = [{"type": "function", "function": {"name": "go", "parameters": NESTED}}]
    (call,) = parse(text, name, functions=offered).calls
    assert json.loads(call.arguments) == {"to": {"x": 1, "name": "Rome"}, "via": ["air", "sea"]}


def test_free_text_in_channels(compiler: GrammarCompiler) -> None:
    form = free_with_calls(tool_format("openai"), FUNCTIONS, True)
    form = after_reasoning(form, reasoning_format("openai_gptoss"), False)
    thoughts = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{"zone":"ab"}'
    for text in (thoughts + call, call, thoughts + "<|channel|>final<|message|>Noon."):
        assert accepts(matcher_of(compiler, **tag(form)), encode(text)), text
    assert not accepts(
        matcher_of(compiler, **tag(form)), encode(thoughts + call.replace("ab", "much too long"))
    )
    assert not accepts(matcher_of(compiler, **tag(form)), encode("Noon."))


@pytest.mark.parametrize("opened", [True, False])
def test_reasoning_comes_first(compiler: GrammarCompiler, opened: bool) -> None:
    calls = required_calls(tool_format("hermes"), FUNCTIONS, True)
    form = after_reasoning(calls, reasoning_format("qwen3"), opened)

    def may_be(text: str) -> bool:
        return accepts(matcher_of(compiler, **tag(form)), encode(text))

    thoughts = "I {think} so.\n</think>\n\n"
    assert may_be(("" if opened else "<think>\n") + thoughts + CALLS["hermes"])
    assert may_be(CALLS["hermes"]) is not opened
    assert not may_be("\n" + CALLS["hermes"])  # white space belongs to the reasoning's end
    assert not may_be(("" if opened else "<think>\n") + thoughts + "words")


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        ({"json": {"type": "integer"}}, "12", "a"),
        ({"json_object": True}, '{"a":1}', "[]"),
        ({"regex": "ab+"}, "abb", "a"),
        ({"choice": ["yes", "no"]}, "no", "na"),
        ({"grammar": 'root ::= "a" "b"'}, "ab", "ba"),
        ({"structural_tag": {"format": {"type": "regex", "pattern": "x{3}"}}}, "xxx", "xx"),
        (
            {"structural_tag": {"triggers": ["<f>"], "structures": [STRUCTURE]}},
            "a<f>1</f>",
            "<f>a</f>",
        ),
    ],
)  # fmt: skip
def test_other_constraints_hold_after_reasoning(
    compiler: GrammarCompiler, constraint: dict[str, Any], good: str, bad: str
) -> None:
    answer = form_of(StructuredOutputsParams(**constraint))
    form = after_reasoning(answer, reasoning_format("deepseek_r1"), True)
    assert accepts(matcher_of(compiler, **tag(form)), encode("hm </think>\n" + good))
    assert not accepts(matcher_of(compiler, **tag(form)), encode("hm </think>\n" + bad))
    channel = as_answer(answer, tool_format("openai"))
    assert accepts(matcher_of(compiler, **tag(channel)), encode("<|channel|>final<|message|>" + good))
