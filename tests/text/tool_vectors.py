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
    quotes: bool = (
        False  # a call inside the reasoning, which is real if the text ends before the reasoning does
    )


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


def _dsml(section: str) -> str:
    return (
        f'<｜DSML｜{section}>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris, "Île"\nde France</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="parts" string="false">[{"a": null}, "}]"]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="exact" string="false">true</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        f'<｜DSML｜invoke name="clock">\n</｜DSML｜invoke>\n</｜DSML｜{section}>'
    )


def _argument(key: str, kind: str, value: str) -> str:
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'


KIMI3 = (
    '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|>'
    + _argument("city", "string", 'Paris, "Île"\nde France')
    + _argument("days", "number", "3")
    + _argument("parts", "array", '[{"a": null}, "}]"]')
    + _argument("exact", "boolean", "true")
    + '<|close|>call<|sep|><|open|>call tool="clock" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
)
NS = "]<]minimax[>["
MINIMAX3 = (
    f'{NS}<tool_call>\n{NS}<invoke name="weather">{NS}<city>Paris, "Île"\nde France{NS}</city>{NS}<days>3{NS}</days>'
    f"{NS}<parts>{NS}<item>{NS}<a>null{NS}</a>{NS}</item>{NS}<item>}}]{NS}</item>{NS}</parts>"
    f'{NS}<exact>true{NS}</exact>{NS}</invoke>\n{NS}<invoke name="clock">{NS}</invoke>\n{NS}</tool_call>'
)
MINIMAX2 = (
    '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris, "Île"\nde France</parameter>\n'
    '<parameter name="days">3</parameter>\n<parameter name="parts">[{"a": null}, "}]"]</parameter>\n'
    '<parameter name="exact">true</parameter>\n</invoke>\n<invoke name="clock">\n</invoke>\n</minimax:tool_call>'
)
STEP3 = (
    '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="weather">'
    '<steptml:parameter name="city">Rome</steptml:parameter><steptml:parameter name="days">3</steptml:parameter>'
    "</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>"
)
HY3 = (
    "<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
    "<tool_call>clock<tool_sep></tool_call>\n</tool_calls>"
)
DOTS = (
    '<dots_function_call>\n<invoke name="weather">\n<parameter name="city">Paris, "Île"\nde France</parameter>\n'
    '<parameter name="days">\n3\n</parameter>\n<parameter name="parts">[{"a": null}, "}]"]</parameter>\n'
    '<parameter name="exact">true</parameter>\n</invoke>\n<invoke name="clock">\n</invoke>\n</dots_function_call>'
)
HORIZON = (
    "<ifm|tool_calls>\n<ifm|tool_call>weather\n<ifm|arg_key>city</ifm|arg_key>\n"
    "<ifm|arg_value>Rome</ifm|arg_value>\n<ifm|arg_key>days</ifm|arg_key>\n<ifm|arg_value>3</ifm|arg_value>\n"
    "</ifm|tool_call>\n<ifm|tool_call>clock\n</ifm|tool_call>\n</ifm|tool_calls>"
)
HORIZON_TYPED = (
    "<ifm|tool_calls><ifm|tool_call>weather<ifm|arg_key>city</ifm|arg_key><ifm|arg_type>string</ifm|arg_type>"
    "<ifm|arg_value>Rome</ifm|arg_value><ifm|arg_key>parts</ifm|arg_key>\n<ifm|arg_type>array[any]</ifm|arg_type>\n"
    "<ifm|arg_value>[1]</ifm|arg_value></ifm|tool_call></ifm|tool_calls>"
)
REPR = repr({"name": "weather", "arguments": PARIS})
ROME = [("weather", {"city": "Rome", "days": 3})]
Q = '<|"|>'
GEMMA = (
    f'<|tool_call>call:weather{{city:{Q}Paris, "Île"\nde France{Q},days:3,parts:[{{a:null}},{Q}}}]{Q}],exact:true}}'
    "<tool_call|><|tool_call>call:clock{}<tool_call|>"
)
COHERE = (
    '[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Rome", "days": 3}},\n'
    '    {"tool_call_id": "1", "tool_name": "clock", "parameters": {}}\n]'
)
K3 = "<|close|>message<|sep|>"

NEW = [
    Vector("deepseek_v32", "Ok\n\n" + _dsml("function_calls"), TWO, "Ok"),
    Vector("deepseek_v4", f"Hm.</think>{_dsml('tool_calls')}", TWO, "", "Hm.", "deepseek_r1"),
    Vector("nemotron", f"Ok\n<TOOLCALL>{LISTED}</TOOLCALL>", TWO, "Ok"),
    Vector("kimi_k3", KIMI3, TWO),
    Vector(
        "kimi_k3",
        f"<|open|>think<|sep|>Hm<|close|>think<|sep|><|open|>response<|sep|>Ok<|close|>response<|sep|>{KIMI3}{K3}",
        TWO,
        "Ok",
        "Hm",
        "kimi_k3",
    ),
    Vector("minimax_m3", "Ok" + MINIMAX3, TWO, "Ok"),
    Vector("minimax_m3", "<mm:think>a</mm:think>b", [], "b", "a", "minimax_m3"),
    Vector("minimax_m2", f"Hm\n</think>\n\n{MINIMAX2}", TWO, "", "Hm", "deepseek_r1"),
    Vector(
        "minimax_m2",
        f"Hm\n</think>\n\nOk{MINIMAX2}",
        TWO,
        "<think>Hm\n</think>\n\nOk",
        thinks="minimax_m2_append_think",
    ),
    Vector("hermes", f"Ok<tool_call>\n{REPR}\n</tool_call>", TWO[:1], "Ok"),
    Vector(
        "hermes",
        "<tool_call>{'id': 'it\\'s', 'type': 'function', 'function': {'name': 'weather', 'arguments': "
        "'{\"city\": \"Rome\", \"days\": 3}'}}</tool_call><tool_call>{'name': 'clock', 'arguments': None}</tool_call>",
        [*ROME, ("clock", {})],
    ),
    Vector(
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": \'Rome\', \'parts\': (None, \'it\'s\')}}</tool_call>',
        [("weather", {"city": "Rome", "parts": [None, "it's"]})],
    ),
    Vector("dots", f"Ok{DOTS}", TWO, "Ok"),
    Vector("k2_horizon", f"Ok{HORIZON}", [*ROME, ("clock", {})], "Ok"),
    Vector("k2_horizon", HORIZON_TYPED, [("weather", {"city": "Rome", "parts": [1]})]),
    Vector(
        "k2_horizon",
        '<ifm|tool_calls><ifm|tool_call>{"name": "weather", "arguments": {"city": "Rome", "days": 3}}</ifm|tool_call>'
        "</ifm|tool_calls>",
        ROME,
    ),
    Vector("k2_horizon", f"Hm</ifm|think>Ok{HORIZON}", [*ROME, ("clock", {})], "Ok", "Hm", "k2_horizon"),
    Vector("k2_horizon", "<ifm|think_fast>Hm</ifm|think_fast>Ok", [], "Ok", "Hm", "k2_horizon"),
    Vector("k2_horizon", f"Hm{HORIZON}", [*ROME, ("clock", {})], "", "Hm", "k2_horizon"),
    Vector("hermes", "Hm</think>Ok", [], "Ok", "Hm", "granite_thinking_parser"),
    Vector("hermes", "◁think▷Hm\n◁/think▷Ok", [], "Ok", "Hm", "kimi"),
    Vector("step3", f"Ok{STEP3}", ROME, "Ok"),
    Vector("hy_v3", f"Ok{HY3}", [*ROME, ("clock", {})], "Ok"),
    Vector("gemma4", f"Ok{GEMMA}", TWO, "Ok"),
    Vector("gemma4", '<|tool_call>call:weather{city:Rome,"days":3}<tool_call|>', ROME),
    Vector("gemma4", "<|channel>thought\nHm<channel|>Ok", [], "Ok", "Hm", "gemma4"),
    Vector(
        "functiongemma",
        "<start_function_call>call:weather{city:<escape>Rome<escape>,days:3}<end_function_call>",
        ROME,
    ),
    Vector("cohere_command3", f"<|START_ACTION|>{COHERE}<|END_ACTION|>", [*ROME, ("clock", {})]),
    Vector(
        "cohere_command3",
        "<|START_THINKING|>Hm<|END_THINKING|><|START_RESPONSE|>Ok  b<|END_RESPONSE|>",
        [],
        "Ok  b",
        "Hm",
        "cohere_command3",
    ),
    Vector("cohere_command_r", f"Action: ```json\n{COHERE}\n```", [*ROME, ("clock", {})]),
    Vector(
        "apertus",
        '<|inner_prefix|>Hm<|inner_suffix|>Ok<|tools_prefix|>[{"weather": {"city": "Rome", "days": 3}}, {"clock": {}}]'
        "<|tools_suffix|>",
        [*ROME, ("clock", {})],
        "Ok",
        "Hm",
        "apertus",
    ),
    Vector(
        "gigachat3",
        'Ok<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}'
        "<|message_sep|>",
        ROME,
        "Ok",
    ),
    Vector("gigachat3", '<|function_call|>{"name": "clock", "arguments": {}}', [("clock", {})]),
    Vector(
        "minicpm5",
        'Ok<function name="weather"><param name="city"><![CDATA[R<b>]]></param><param name="days">3</param></function>',
        [("weather", {"city": "R<b>", "days": 3})],
        "Ok",
    ),
    Vector(
        "functionary_v32",
        'all\nOk>>>weather\n{"city": "Rome", "days": 3}>>>clock\n{}',
        [*ROME, ("clock", {})],
        "Ok",
    ),
    Vector("functionary_v32", "just text >>> not\ncalls", [], "just text >>> not\ncalls"),
    Vector("hunyuan_a13b", "<think>\nHm\n</think>\n<answer>\nOk\n</answer>", [], "Ok", "Hm", "hunyuan_a13b"),
    Vector(
        "hunyuan_a13b",
        f"<think>\nHm\n</think>\n<answer>\nOk</answer>\n<tool_calls>{LISTED}</tool_calls>",
        TWO,
        "Ok",
        "Hm",
        "hunyuan_a13b",
    ),
    Vector(
        "granite",
        "<think>Hm</think>\n<response>a </response> b</response>",
        [],
        "a </response> b",
        "Hm",
        "granite33",
    ),
    Vector(
        "ernie45",
        f"Hm\n</think>\n\n<response>\nOk\n</response>\n{_hermes('clock', {})}",
        [("clock", {})],
        "Ok",
        "Hm",
        "ernie45",
    ),
    Vector(
        "longcat",
        f"<longcat_think>Hm</longcat_think>{_hermes('clock', {}).replace('tool_call>', 'longcat_tool_call>')}",
        [("clock", {})],
        "",
        "Hm",
        "longcat",
    ),
    Vector(
        "longcat",
        "<longcat_tool_call>weather\n<longcat_arg_key>city</longcat_arg_key>\n<longcat_arg_value>Rome</longcat_arg_value>\n"
        "<longcat_arg_key>days</longcat_arg_key>\n<longcat_arg_value>3</longcat_arg_value>\n</longcat_tool_call>",
        ROME,
    ),
    Vector(
        "olmo3",
        f"Hm</think><function_calls>\n{PYTHON[1:-1].replace('), ', ')' + chr(10))}\n</function_calls>",
        TWO,
        "",
        "Hm",
        "olmo3",
    ),
    Vector("xlam", LISTED, TWO),
    Vector("xlam", f"Ok <tool_call>{LISTED}</tool_call>", TWO, "Ok"),
    Vector("xlam", "See [1] and [a]", [], "See [1] and [a]"),
    Vector(
        "poolside_v1",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
        [("weather", {"city": "Rome"})],
    ),
    Vector(
        "jamba",
        "Here are my reasoning steps:\nHm\n[BEGIN FINAL RESPONSE]\nOk\n[END FINAL RESPONSE]",
        [],
        "Ok",
        "Hm",
        "apriel",
    ),
    Vector("lfm2", f"<|tool_call_start|>{LISTED}<|tool_call_end|>Done", TWO, "Done"),
    Vector("mistral_v11", "Ok [THINK]Hm[/THINK] so", [], "Ok  so", "Hm", "mistral"),
    Vector("mistral_v11", "a[/THINK]b", [], "ab", "", "mistral"),
    Vector(
        "openai",
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
        "<|channel|>commentary to=assistant<|channel|>final<|message|>Noon.<|return|>",
        [],
        "I look.\nNoon.",
        "One.\nTwo.",
    ),
    Vector(
        "hermes",
        f"<think>I could call {_hermes('weather', {'days': 1})} but</think>{_hermes('clock', {})}",
        [("clock", {})],
        "",
        f"I could call {_hermes('weather', {'days': 1})} but",
        "qwen3",
        quotes=True,
    ),
    Vector(
        "pythonic",
        "<think>a [1] [clock()] b</think>[clock()]",
        [("clock", {})],
        "",
        "a [1] [clock()] b",
        "qwen3",
        quotes=True,
    ),
]

VECTORS = [
    *NEW,
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
