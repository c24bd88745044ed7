"""Outputs in each format of tool calls and reasoning, with what is in them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


def function(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


OFFERED = [
    function(
        "weather",
        city={"type": "string"},
        days={"type": "integer"},
        units={"enum": ["metric", "imperial"]},
        parts={"type": "array"},
        exact={"type": "boolean"},
        note={"type": ["string", "null"]},
    ),
    function("clock"),
]
PARIS: dict[str, Any] = {
    "city": 'Paris, "Île"\nde France',
    "days": 3,
    "parts": [{"a": None}, "}]"],
    "exact": True,
}


@dataclass(frozen=True)
class Vector:
    """An output in a format (and a reasoning format) and what is in it."""

    tools: str
    text: str
    calls: list[tuple[str, Any]] = field(default_factory=list)
    content: str = ""
    reasoning: str = ""
    thinks: str | None = None
    offered: bool = True


def _hermes(name: str, arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def _deepseek3(name: str, arguments: Any) -> str:
    return (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
        f"{json.dumps(arguments, indent=2)}\n```<｜tool▁call▁end｜>"
    )


def _deepseek31(name: str, arguments: Any) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"


def _kimi(name: str, index: int, arguments: Any) -> str:
    return (
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
        f"{json.dumps(arguments)}<|tool_call_end|>"
    )


def _section(calls: str) -> str:
    return f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"


TWO = [("weather", PARIS), ("clock", {})]
LISTED = json.dumps([{"name": n, "arguments": a} for n, a in TWO])
XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nNew\n York <b>\n</parameter>\n<parameter=days>\n3\n"
    '</parameter>\n<parameter=parts>\n[{"a": null}]\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n'
    "<parameter=units>\nmetric\n</parameter>\n<parameter=note>\nnull\n</parameter>\n</function>\n</tool_call>"
)
XML_ARGUMENTS = {
    "city": "New\n York <b>",
    "days": 3,
    "parts": [{"a": None}],
    "exact": True,
    "units": "metric",
    "note": None,
}
PYTHON = (
    r"""[weather(city='Paris, "Île"\nde France', days=3, parts=[{'a': None}, "}]"], exact=True), clock()]"""
)
GPT = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"

VECTORS = [
    Vector("hermes", _hermes(*TWO[0]) + "\n" + _hermes(*TWO[1]), TWO),
    Vector("hermes", "Let me look.\n" + _hermes("clock", {}), [("clock", {})], "Let me look."),
    Vector("hermes", "no call <tool_cal here <tool", [], "no call <tool_cal here <tool"),
    Vector("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("f", {"a": 1})]),
    Vector(
        "hermes",
        '<tool_call>{"name":"f","arguments":"{\\"a\\": \\"\\ud83d\\ude42\\"}"}</tool_call>',
        [("f", {"a": "🙂"})],
    ),
    Vector("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call> done', [("f", {})], "done"),
    Vector("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", {})]),
    Vector(
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "x\ny\tz", "b": "\\d\\\'"}}</tool_call>',
        [("f", {"a": "x\ny\tz", "b": "\\d'"})],
    ),
    Vector(
        "hermes",
        f"<think>\nHm, <b>.\n</think>\n\nOk.\n{_hermes('clock', {})}",
        [("clock", {})],
        "Ok.",
        "Hm, <b>.",
        "qwen3",
    ),
    Vector("hermes", "<think>\n\n</think>\n\nOk.  Yes \n", [], "Ok.  Yes \n", "", "qwen3"),
    Vector("hermes", "No <think>, no </think>.", [], "No <think>, no </think>.", "", "qwen3"),
    Vector("hermes", "<think>\nno end\n", [], "", "no end\n", "qwen3"),
    Vector("hermes", f"<think>I call\n{_hermes('clock', {})} so", [("clock", {})], "so", "I call", "qwen3"),
    Vector("hermes", "<think>as <tool_call>{} here</think>x", [], "x", "as <tool_call>{} here", "qwen3"),
    Vector("hermes", "I see.\n</think>\nYes", [], "Yes", "I see.", "deepseek_r1"),
    Vector("hermes", "<think>\nI see.</think>Yes", [], "Yes", "I see.", "deepseek_r1"),
    Vector("granite", "Here is my thought process: ab\n\nHere's my response:\n c", [], "c", "ab", "granite"),
    Vector("mistral", "[THINK]Well[/THINK]Yes", [], "Yes", "Well", "mistral"),
    Vector(
        "llama3_json", '{"name": "weather", "parameters": {"city": "Rome"}}', [("weather", {"city": "Rome"})]
    ),
    Vector(
        "llama3_json",
        '<|python_tag|>{"name": "clock", "parameters": {}}; {"name": "clock", "parameters": {"a": {}}}',
        [("clock", {}), ("clock", {"a": {}})],
    ),
    Vector("llama3_json", 'It is {"name": "clock", "parameters": {}} now.', [("clock", {})], "It is  now."),
    Vector(
        "llama3_json",
        '{"name": "Ann", "parameters": {"age": 3}}',
        [],
        '{"name": "Ann", "parameters": {"age": 3}}',
    ),
    Vector("llama3_json", '{"type": "function", "name": "f", "parameters": {}}', [("f", {})], offered=False),
    Vector("llama3_json", 'Set {"a": {"name": 1}} [{"b": 2}]', [], 'Set {"a": {"name": 1}} [{"b": 2}]'),
    Vector("pythonic", PYTHON, TWO),
    Vector("pythonic", f"<|python_start|>{PYTHON}<|python_end|>", TWO),
    Vector(
        "pythonic",
        "[weather(days=-.5, parts=(1_0, +2., 1e3,), note='a' , )]",
        [("weather", {"days": -0.5, "parts": [10, 2.0, 1000.0], "note": "a"})],
    ),
    Vector("pythonic", "See [this](a) [x(a=1)] and [1, 2].", [], "See [this](a) [x(a=1)] and [1, 2]."),
    Vector("pythonic", "[clock(1)]", [], "[clock(1)]"),
    Vector("mistral", f"[TOOL_CALLS]{LISTED}", TWO),
    Vector(
        "mistral",
        'Ok.[TOOL_CALLS][{"name": "f", "arguments": {"a": [1]}, "id": "abcdefghi"}]',
        [("f", {"a": [1]})],
        "Ok.",
    ),
    Vector(
        "mistral_v11",
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abc123DEF[ARGS]{}',
        [("f", {"a": 1}), ("g", {})],
    ),
    Vector("mistral_v11", '[TOOL_CALLS]f{"a": 1}', [("f", {"a": 1})]),
    Vector("deepseek_v3", "Ok" + _section(_deepseek3(*TWO[0]) + "\n" + _deepseek3(*TWO[1])), TWO, "Ok"),
    Vector("deepseek_v31", "Ok" + _section(_deepseek31(*TWO[0]) + _deepseek31(*TWO[1])), TWO, "Ok"),
    Vector(
        "kimi_k2",
        f"<|tool_calls_section_begin|>{_kimi('weather', 0, PARIS)}{_kimi('clock', 1, {})}<|tool_calls_section_end|>",
        TWO,
    ),
    Vector("granite", f"<|tool_call|>{LISTED}", TWO),
    Vector("granite", f"<tool_call>{LISTED}", TWO),
    Vector("granite_20b_fc", '<function_call> {"name": "f", "arguments": {"a": 1}}', [("f", {"a": 1})]),
    Vector("phi4_mini", f"functools{LISTED}", TWO),
    Vector("phi4_mini", "the functools module", [], "the functools module"),
    Vector("qwen3_coder", XML, [("weather", XML_ARGUMENTS)]),
    Vector(
        "qwen3_coder",
        f"First:\n\n{XML}\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
        [("weather", XML_ARGUMENTS), ("clock", {})],
        "First:",
    ),
    Vector(
        "qwen3_coder",
        "<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>",
        [("weather", {"city": "Rome"})],
    ),
    Vector(
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</function>\n</tool_call>",
        [("weather", {"city": "Rome"})],
    ),
    Vector(
        "seed_oss",
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Rome</parameter>\n</function>\n</seed:tool_call>",
        [("weather", {"city": "Rome"})],
    ),
    Vector(
        "functionary_v31", '<function=weather>{"city": "Rome"}</function>', [("weather", {"city": "Rome"})]
    ),
    Vector(
        "glm45",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        [("weather", {"city": "Rome", "days": 3})],
    ),
    Vector(
        "openai",
        GPT + '<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{"a": [1]}<|call|>',
        [("clock", {"a": [1]})],
        "",
        "Let me see.",
    ),
    Vector("openai", " to=functions.clock<|channel|>commentary json<|message|>{}", [("clock", {})]),
    Vector(
        "openai", GPT + "<|channel|>final<|message|>It is noon.<|return|>", [], "It is noon.", "Let me see."
    ),
    Vector(
        "openai",
        "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.f<|message|><|call|>",
        [("f", {})],
        "I will look.",
    ),
    Vector("openai", "<|channel|>analysis to=python<|message|>1 + 1<|call|>", [], "", "1 + 1"),
    Vector("granite", '[{"name": "clock", "arguments": {}}]', [("clock", {})]),
    Vector("jamba", f"<tool_calls>{LISTED}</tool_calls>", TWO),
    Vector(
        "internlm",
        'Ok<|action_start|><|plugin|>\n{"name": "f", "parameters": {"a": 1}}<|action_end|>',
        [("f", {"a": 1})],
        "Ok",
    ),
    Vector("lfm2", f"<|tool_call_start|>{PYTHON}<|tool_call_end|>Done.", TWO, "Done."),
    Vector("llama3_json", '{"parameters": {"a": 1}, "name": "clock"}', [("clock", {"a": 1})]),
    Vector("openai", "plain text", [], "plain text"),
]
