"""Tool calls and reasoning: a vector or more of each format, every way to split, cut and damage them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ConfigError, RequestError
from quire.text.formats.registry import (
    REASONING_FORMATS,
    REASONING_NAMES,
    TOOL_FORMATS,
    TOOL_NAMES,
    reasoning_format,
    tool_format,
)
from quire.text.output.events import CallArguments, CallEnd, CallStart, Content, Parsed, Reasoning, ToolCall
from quire.text.output.parser import OutputParser, parse
from quire.text.output.schemas import schemas
from quire.text.template.render import ChatTemplate
from tests.shared import DATA, require
from tests.text.tool_vectors import OFFERED, VECTORS, Vector, function

EVERY = pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v.tools}-{VECTORS.index(v)}")


def parser_of(vector: Vector, located: bool = False) -> OutputParser:
    from_names = {f["function"]["name"]: f["function"]["parameters"] for f in OFFERED}
    reasoning = None if vector.thinks is None else reasoning_format(vector.thinks)
    functions = from_names if vector.offered else None
    return OutputParser(tool_format(vector.tools), reasoning, functions, located=located)


def read(vector: Vector, *parts: str) -> Parsed:
    parser, parsed = parser_of(vector), Parsed()
    for part in parts:
        parsed.add(parser.feed(part))
    parsed.add(parser.finish())
    return parsed


def said(parsed: Parsed) -> str:
    """All text that came out, with the escapes of arguments undone."""
    parts = [parsed.reasoning, parsed.content]
    for call in parsed.calls:
        parts += [call.name, call.arguments.replace("\\n", "\n")]
    return "\n".join(parts)


@EVERY
def test_what_is_found(vector: Vector) -> None:
    parsed = read(vector, vector.text)
    assert parsed.content == vector.content
    assert parsed.reasoning == vector.reasoning
    assert [(c.name, json.loads(c.arguments)) for c in parsed.calls] == vector.calls
    assert all(c.complete for c in parsed.calls)


@EVERY
def test_any_split_gives_the_same(vector: Vector) -> None:
    text = vector.text
    whole = read(vector, text)
    assert read(vector, *text) == whole
    for i in range(len(text)):
        assert read(vector, text[:i], text[i:]) == whole


@EVERY
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_places_of_the_content(vector: Vector, size: int) -> None:
    """Each character of the content stands where the parser says, in order, but for a few that the parser adds."""
    parser, parsed = parser_of(vector, located=True), Parsed()
    for at in range(0, len(vector.text), size):
        parsed.add(parser.feed(vector.text[at : at + size]))
        assert len(parser.places) == len(parsed.content)
    parsed.add(parser.finish())
    assert parsed.content == vector.content
    for character, place in zip(parsed.content, parser.places, strict=True):
        assert character == vector.text[place] if place >= 0 else character in "\n<think>"
    real = [place for place in parser.places if place >= 0]
    assert real == sorted(set(real))


@EVERY
def test_cut_off_anywhere(vector: Vector) -> None:
    """No exception, whole calls kept, and every word that came in comes out."""
    for i in range(len(vector.text)):
        text = vector.text[:i]
        parsed = read(vector, text)
        assert parsed == read(vector, *text)
        finished = [c for c in parsed.calls if c.complete]
        assert vector.quotes or finished == read(vector, vector.text).calls[: len(finished)]
        for name in ("Paris", "Île", "weather", "Rome", "York"):
            assert said(parsed).count(name) >= min(1, text.count(name)), text


@EVERY
def test_damaged_anywhere(vector: Vector) -> None:
    """A character too few or too many changes what is found, and loses no argument's text."""
    for i in range(len(vector.text)):
        for text in (vector.text[:i] + vector.text[i + 1 :], vector.text[:i] + "~" + vector.text[i:]):
            parsed = read(vector, text)
            assert parsed == read(vector, text[: i + 1], text[i + 1 :])
            for name in ("Paris", "Rome", "York", "Let me"):
                assert said(parsed).count(name) >= min(1, text.count(name)), text


MARKERS = sorted(
    {m for f in map(tool_format, TOOL_FORMATS) for m in (*f.markers, *f.bare)}
    | {m for f in map(reasoning_format, REASONING_FORMATS) for m in f.markers}
    | {"to=functions.", ">>>", "all\n"}
)
FRAGMENTS = [
    *MARKERS, "<function=", ">", "<parameter=", "</parameter>", "</function>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>", '{"name": "', '"', '", "arguments": ', '"parameters": {', "{", "}", "[", "]",
    "}}", '{"name": "f", "arguments": {}}', "weather", "clock(", "f", "a=", ")", ", ", ":", "\n", " ", "\\", "\\u00e",
    "9", "'", "null", "1", "-", "é🙂", "commentary ", "analysis",
]  # fmt: skip
FORMATS = st.sampled_from(TOOL_FORMATS)
THINKS = st.sampled_from([None, *REASONING_FORMATS])


@settings(max_examples=600, deadline=None)
@given(FORMATS, THINKS, st.booleans(), st.lists(st.sampled_from(FRAGMENTS), max_size=24), st.data())
def test_streamed_equals_whole(
    tools: str, thinks: str | None, offered: bool, fragments: list[str], data: st.DataObject
) -> None:
    text = "".join(fragments)
    vector = Vector(tools, text, thinks=thinks, offered=offered)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(vector, text)
    assert read(vector, *parts) == whole
    assert read(vector, *text) == whole


@settings(max_examples=300, deadline=None)
@given(
    FORMATS.filter(lambda name: name != "openai"),
    st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    st.data(),
)
def test_no_word_is_lost(tools: str, fragments: list[str], data: st.DataObject) -> None:
    words = ["zebra", "quagga", "okapi"]
    for word in words:
        fragments.insert(data.draw(st.integers(0, len(fragments))), f" {word} ")
    parsed = read(Vector(tools, ""), "".join(fragments))
    assert all(word in said(parsed) for word in words)


@settings(max_examples=200, deadline=None)
@given(FORMATS, THINKS, st.text(max_size=60))
def test_text_without_markers_is_left_alone(tools: str, thinks: str | None, text: str) -> None:
    text = re.sub(r"[<\[{]|functools|to=|Here", "", text)
    form = None if thinks is None else reasoning_format(thinks)
    parser, parsed = OutputParser(tool_format(tools), form, place="start"), Parsed()
    parsed.add(parser.feed(text))
    parsed.add(parser.finish())
    assert parsed == Parsed(content=text)


def test_events_come_as_soon_as_they_are_known() -> None:
    parser = OutputParser(tool_format("hermes"), reasoning_format("qwen3"))
    assert parser.feed("<think>") == []
    assert parser.feed("Hm") == [Reasoning("Hm")]
    assert parser.feed(".\n</thi") == [Reasoning(".")]
    assert parser.feed("nk>\n\nWell <") == [Content("Well")]
    assert parser.feed("b>") == [Content(" <b>")]
    assert parser.feed('<tool_call>\n{"name": "f", "argu') == []
    assert parser.feed('ments": {"a": "x') == [CallStart(0, "f"), CallArguments(0, '{"a": "x')]
    assert parser.feed("y\\") == [CallArguments(0, "y")]
    assert parser.feed('n"}') == [CallArguments(0, '\\n"}'), CallEnd(0, True)]
    assert parser.feed("}\n</tool_call>") == []
    assert parser.finish() == []


def test_what_breaks_off_is_told() -> None:
    cut = parse('<tool_call>{"name": "f", "arguments": {"a": "half a te', "hermes")
    assert cut.calls == [ToolCall("f", '{"a": "half a te', complete=False)]
    broken = parse('<tool_call>{"name": "f", "arguments": {"a": <oops>}}</tool_call>', "hermes")
    assert broken.calls == [ToolCall("f", '{"a": ', complete=False)]
    assert broken.content == "<oops>}}</tool_call>"
    unclosed = parse('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', "hermes")
    assert unclosed == Parsed(calls=[ToolCall("f", '{"a": 1}', complete=True)])
    surplus = parse('<tool_call>{"name": "f", "arguments": {"a": 1}}}]\n</tool_call>', "hermes")
    assert surplus == unclosed
    nothing = '<tool_call>{"name": "", "arguments": {}}</tool_call>'
    assert parse(nothing, "hermes") == Parsed(content=nothing)


@pytest.mark.parametrize("text", ["<", "<tool_call>", '<tool_call>\n{"na', '<tool_call>\n{"name": "clo'])
def test_a_forced_call_that_is_cut_off_is_no_content(text: str) -> None:
    def forced(offered: dict[str, Any], *parts: str) -> Parsed:
        parser, parsed = OutputParser(tool_format("hermes"), None, offered, forced=True), Parsed()
        for part in parts:
            parsed.add(parser.feed(part))
        parsed.add(parser.finish())
        return parsed

    for parts in ((text,), tuple(text)):
        assert forced({"clock": {}, "dice": {}}, *parts) == Parsed()
        assert forced({"clock": {}}, *parts) == Parsed(calls=[ToolCall("clock", "", complete=False)])
    whole = forced({"clock": {}}, '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>')
    assert whole == Parsed(calls=[ToolCall("clock", "{}", complete=True)])


def test_ids_that_the_model_writes_are_kept() -> None:
    kimi = "<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert parse(kimi, "kimi_k2").calls == [ToolCall("f", "{}", complete=True, id="functions.f:3")]
    mistral = "[TOOL_CALLS]f[CALL_ID]abc123DEF[ARGS]{}"
    assert parse(mistral, "mistral_v11").calls == [ToolCall("f", "{}", complete=True, id="abc123DEF")]


def test_output_continues_where_the_prompt_left_off() -> None:
    assert parse("m sure.</think>Yes", None, "qwen3", place="reasoning") == Parsed("Yes", "m sure.")
    assert parse(" 4.", None, "deepseek_r1", place="answer") == Parsed(" 4.")
    assert parse("m</think> 4.", None, "minimax_m2_append_think") == Parsed("<think>m</think> 4.")
    assert parse("m</think> 4.", None, "minimax_m2_append_think", place="start") == Parsed("m</think> 4.")
    rest = " sure.<|end|><|start|>assistant<|channel|>final<|message|>Yes"
    assert parse(rest, "openai", "openai_gptoss", place="reasoning") == Parsed("Yes", " sure.")
    assert parse(" 4.", "openai", "openai_gptoss", place="answer") == Parsed(" 4.")


def test_recognising_a_format_loads_its_module_alone() -> None:
    start = "quire.text.formats."
    code = f"""import sys
from quire.text.formats.registry import reasoning_format, tool_format
tool_format("auto", "<tool_calls>["), reasoning_format("auto", "<tool_call>")
print(*sorted(name for name in sys.modules if name.startswith({start!r})))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [start + name for name in ("registry", "shapes", "tools", "tools.objects")]


def test_hostile_text_costs_linear_time() -> None:
    """Would take minutes if anything were read again and again."""
    for tools in map(tool_format, TOOL_FORMATS):
        for piece in (
            '{"name": ',
            "[" * 4,
            "{[(",
            "<tool_call>{",
            '{"parameters":{',
            "{'a': '",
            "<function=f>",
            " \n",
        ):
            text = piece * (12_000 // len(piece))
            parsed = parse(text, tools)
            assert len(said(parsed)) >= len(text) // 4


LONDON = ("get_weather", {"location": "London"})


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        ("gemma4", '<|tool_call>:get_weather{location:<|"|>London<|"|>}<tool_call|>', [LONDON]),
        ("gemma4", '<|tool_call>get_weather{location:<|"|>London<|"|>}<tool_call|>', [LONDON]),
        ("gemma4", '<|tool_call>call: get_weather {location:<|"|>London<|"|>}<tool_call|>', [LONDON]),
        ("gemma4", '<|tool_call>call:get_weather{location:<|"|>London<tool_call|>', [LONDON]),
        ("gemma4", "<|tool_call>call:f{b:[1,2}<tool_call|>", [("f", {"b": [1, 2]})]),
        ("gemma4", "<|tool_call>call:f{b:{c:[1]<tool_call|>", [("f", {"b": {"c": [1]}})]),
        ("pythonic", "[f(a='python -c 'print(1)' x')]", [("f", {"a": "python -c 'print(1)' x"})]),
        ("pythonic", "[f(a='it's', b=\"x\"), g()]", [("f", {"a": "it's", "b": "x"}), ("g", {})]),
        ("pythonic", "[f(a='echo 'a', b')]", [("f", {"a": "echo 'a', b"})]),
        ("pythonic", '[f(a="""x "y" z""", b=1)]', [("f", {"a": 'x "y" z', "b": 1})]),
        ("pythonic", "[f(a={'x','y'}, b=('z',))]", [("f", {"a": ["x", "y"], "b": ["z"]})]),
        ("pythonic", "[f(a={'x': {1}, 2: {}})]", [("f", {"a": {"x": [1], "2": {}}})]),
        ("lfm2", '<|tool_call_start|>[f(a="say "hi" now")]<|tool_call_end|>', [("f", {"a": 'say "hi" now'})]),
        (
            "olmo3",
            "<function_calls>f(a='x')\ng(b='it's')</function_calls>",
            [("f", {"a": "x"}), ("g", {"b": "it's"})],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": True, "b": None}}</tool_call>',
            [("f", {"a": True, "b": None})],
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, 2}}</tool_call>', [("f", {"a": [1, 2]})]),
        ("hermes", '<tool_call>```json\n{"name": "f", "arguments": {}}\n```</tool_call>', [("f", {})]),
        (
            "hermes",
            '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {}}}</tool_call>',
            [("f", {})],
        ),
        ("pythonic", "[f(a=1 2)] ", []),
        ("pythonic", "[f(a={'x': 1, 2})] ", []),
        ("lfm2", "<|tool_call_start|>[f(a={'x', 2: 3})]<|tool_call_end|>", []),
    ],
)
def test_near_misses_are_calls_or_text_but_never_half_a_call(
    form: str, text: str, calls: list[tuple[str, Any]]
) -> None:
    found = parse(text, form)
    assert [(call.name, json.loads(call.arguments), call.complete) for call in found.calls] == [
        (name, arguments, True) for name, arguments in calls
    ]
    assert found.content == ("" if calls else text)
    for cut in range(len(text)):
        parser, split = OutputParser(tool_format(form)), Parsed()
        for part in (text[:cut], text[cut:]):
            split.add(parser.feed(part))
        split.add(parser.finish())
        assert split == found, cut


def test_arguments_without_a_key_have_the_names_of_the_schema() -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    offered = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    found = parse('[f("London", days=2)]', "pythonic", None, offered).calls[0]
    assert found.arguments == '{"city": "London", "days": 2}'


def test_deep_values_are_no_call() -> None:
    text = "[f(a=" + "[" * 500 + "]" * 500 + ")]"
    assert not any(call.complete for call in parse(text, "pythonic").calls)
    deep = '{"a": ' + "[" * 5000 + "]" * 5000 + "}"
    assert parse(f'<tool_call>{{"name": "f", "arguments": {deep}}}</tool_call>').calls[0].arguments == deep


def test_values_are_of_the_types_of_the_schema() -> None:
    def arguments(offered: list[dict[str, Any]] | None) -> Any:
        text = "<function=f><parameter=a>\n12\n</parameter><parameter=b>\n{'x': 1}\n</parameter></function>"
        return json.loads(parse(text, "qwen3_coder", functions=offered).calls[0].arguments)

    assert arguments(None) == {"a": 12, "b": "{'x': 1}"}
    assert arguments([function("f", a={"type": "string"})]) == {"a": "12", "b": "{'x': 1}"}
    assert arguments([function("f", a={"type": "number"}, b={"type": "object"})])["a"] == 12
    assert arguments([function("f", a={"enum": ["12", "13"]})])["a"] == "12"
    assert arguments([function("f", a={"const": 12})])["a"] == 12


def test_the_prompt_tells_where_the_output_starts() -> None:
    qwen, deepseek = reasoning_format("qwen3"), reasoning_format("deepseek_r1")
    gpt, cohere = reasoning_format("openai_gptoss"), reasoning_format("cohere_command3")
    assert qwen is not None
    assert deepseek is not None
    assert gpt is not None
    assert cohere is not None
    assert qwen.place("<|im_start|>assistant\n<think>\n") == "reasoning"
    assert qwen.place("<|im_start|>assistant\n<think>\n\n</think>\n\n") == "answer"
    assert qwen.place("<|im_start|>assistant\n") == "start"
    assert qwen.place("<|im_start|>assistant\n<think>I'm", True) == "reasoning"
    assert qwen.place("<|im_start|>assistant\nIt is", True) == "answer"
    assert deepseek.place("<｜Assistant｜>") == "reasoning"
    assert deepseek.place("<｜Assistant｜></think>") == "answer"
    assert deepseek.place("<｜Assistant｜>It is", True) == "answer"
    assert gpt.place("<|start|>assistant") == "start"
    assert gpt.place("<|start|>assistant<|channel|>final<|message|>It is", True) == "answer"
    assert gpt.place("<|start|>assistant<|channel|>analysis<|message|>Hm", True) == "reasoning"
    assert gpt.place("<|channel|>analysis<|message|>Hm<|end|><|start|>assistant") == "start"
    assert cohere.place("<|START_THINKING|><|END_THINKING|>") == "answer"


@pytest.mark.parametrize(
    ("template", "tools", "thinks"),
    [
        ("Apertus-8B-Instruct", "apertus", "apertus"),
        ("Apriel-1.6-15b-Thinker-fixed", "jamba", "apriel"),
        ("ByteDance-Seed-OSS", "seed_oss", "seed_oss"),
        ("Cohere2MoE", "cohere_command3", "cohere_command3"),
        ("CohereForAI-c4ai-command-r7b-12-2024-tool_use", "cohere_command3", "cohere_command3"),
        ("GLM-4.6", "glm45", "qwen3"),
        ("GLM-5.2", "glm45", "qwen3"),
        ("GigaChat3-10B-A1.8B", "gigachat3", None),
        ("HuggingFaceTB-SmolLM3-3B", "hermes", "qwen3"),
        ("Kimi-K2-Instruct", "kimi_k2", None),
        ("LFM2-8B-A1B", "lfm2", None),
        ("LFM2.5-Instruct", "lfm2", "qwen3"),
        ("Mistral-Small-3.2-24B-Instruct-2506", "mistral_v11", None),
        ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "hermes", None),
        ("Qwen-Qwen2.5-7B-Instruct", "hermes", None),
        ("Qwen-Qwen3-0.6B", "hermes", "qwen3"),
        ("Qwen3.5-4B", "qwen3_coder", "qwen3"),
        ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek_v3", "qwen3"),
        ("deepseek-ai-DeepSeek-V3.2", "deepseek_v32", "qwen3"),
        ("deepseek-ai-DeepSeek-V4", "deepseek_v4", "qwen3"),
        ("google-gemma-2-2b-it", "hermes", None),
        ("google-gemma-4-31B-it-interleaved", "gemma4", "gemma4"),
        ("ibm-granite-granite-3.3-2B-Instruct", "granite", "granite33"),
        ("llama-cpp-deepseek-r1", "deepseek_v3", "qwen3"),
        ("meetkai-functionary-medium-v3.1", "functionary_v31", None),
        ("meetkai-functionary-medium-v3.2", "functionary_v32", "functionary_v32"),
        ("meta-llama-Llama-3.2-3B-Instruct", "llama3_json", None),
        ("meta-llama-Llama-3.3-70B-Instruct", "llama3_json", None),
        ("mistralai-Ministral-3-14B-Reasoning-2512", "mistral_v11", "mistral"),
        ("mistralai-Mistral-Nemo-Instruct-2407", "mistral", None),
        ("openai-gpt-oss-120b", "openai", "openai_gptoss"),
        ("stepfun-ai-Step-3.5-Flash", "qwen3_coder", "qwen3"),
        ("unsloth-mistral-Devstral-Small-2507", "mistral_v11", None),
    ],
)
def test_templates_are_recognised(template: str, tools: str, thinks: str | None) -> None:
    text = require(DATA / "templates-llamacpp" / f"{template}.jinja").read_text()
    form = tool_format("auto", text)
    assert form is not None
    assert form.name == tools
    found = reasoning_format("auto", text)
    assert (None if found is None else found.name) == thinks


def test_a_template_whose_tools_nobody_recognises_has_no_format() -> None:
    shown = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}"
    assert tool_format("auto", shown) is None
    hermes = tool_format("auto", "{{ messages[0].content }} tools")
    assert hermes is not None
    assert hermes.name == "hermes"


# What each template writes for an assistant's calls is what the model was taught to write.
@pytest.mark.parametrize(
    ("template", "single"),
    [
        ("Qwen-Qwen2.5-7B-Instruct", False),
        ("Qwen-Qwen3-0.6B", False),
        ("meta-llama-Llama-3.2-3B-Instruct", True),
        ("mistralai-Mistral-Nemo-Instruct-2407", False),
        ("Mistral-Small-3.2-24B-Instruct-2506", False),
        ("unsloth-mistral-Devstral-Small-2507", False),
        ("llama-cpp-deepseek-r1", False),
        ("openai-gpt-oss-120b", True),
        ("GLM-4.6", False),
        ("GLM-5.2", False),
        ("ByteDance-Seed-OSS", False),
        ("Qwen3.5-4B", False),
        ("stepfun-ai-Step-3.5-Flash", False),
        ("deepseek-ai-DeepSeek-V3.2", False),
        ("deepseek-ai-DeepSeek-V4", False),
        ("google-gemma-4-31B-it-interleaved", False),
        ("Apertus-8B-Instruct", False),
        ("Apriel-1.6-15b-Thinker-fixed", False),
        ("Cohere2MoE", False),
        ("CohereForAI-c4ai-command-r7b-12-2024-tool_use", False),
        ("GigaChat3-10B-A1.8B", True),
        ("Kimi-K2-Instruct", False),
        ("meetkai-functionary-medium-v3.1", False),
        ("meetkai-functionary-medium-v3.2", False),
    ],
)
def test_what_templates_write_is_read(template: str, single: bool) -> None:
    path = require(DATA / "templates-llamacpp" / f"{template}.jinja")
    calls = (
        [("weather", {"city": "Rome", "days": 3})]
        if single
        else [("weather", {"city": "Rome", "days": 3}), ("clock", {})]
    )
    tool_calls = [
        {"id": f"abcdefgh{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    user = {"role": "user", "content": "Hello!"}
    source = ChatTemplate(path.read_text(), {"bos_token": "<s>", "eos_token": "</s>"})
    before = source.render([user], add_generation_prompt=True)
    after = source.render(
        [user, {"role": "assistant", "content": "", "tool_calls": tool_calls}], add_generation_prompt=False
    )
    text = after[len(before) :] if after.startswith(before) else after[after.index("Hello!") + 6 :]
    parsed = parse(text, tool_format("auto", path.read_text()), functions=OFFERED)
    assert [(c.name, json.loads(c.arguments)) for c in parsed.calls] == calls


def test_names() -> None:
    for name in (
        "hermes",
        "llama3_json",
        "pythonic",
        "mistral",
        "deepseek_v3",
        "granite",
        "phi4_mini_json",
        "openai",
    ):
        assert tool_format(name).name in TOOL_FORMATS
    assert [tool_format(name).name for name in TOOL_FORMATS] == list(TOOL_FORMATS)
    assert [reasoning_format(name).name for name in REASONING_FORMATS] == list(REASONING_FORMATS)
    assert reasoning_format("none") is None
    assert reasoning_format("identity") is None
    for names, known in ((TOOL_NAMES, TOOL_FORMATS), (REASONING_NAMES, REASONING_FORMATS)):
        assert not set(names) & set(known)
        assert set(names.values()) <= set(known)
    assert reasoning_format("auto", "no tags") is None
    with pytest.raises(ConfigError, match=r"'nothing' is unknown; choose one of .*hermes"):
        tool_format("nothing")
    with pytest.raises(ConfigError, match=r"'nothing' is unknown; choose one of .*qwen3"):
        reasoning_format("nothing")
    with pytest.raises(RequestError, match=r"tools\[0\] must be a function with a name"):
        parse("", functions=[{"type": "function"}])


def test_recorded_streams_survive_their_format() -> None:
    """Arguments and answers that another server recorded, token by token, written as Llama writes calls."""
    folder = require(DATA / "toolparse-tgi")
    streams = [json.loads(path.read_text()) for path in sorted(folder.rglob("*.json"))]
    num_calls = 0
    for stream in streams:
        if not isinstance(stream, list) or not stream or "choices" not in stream[0]:
            continue
        name, pieces, content = "", [], []
        for chunk in stream:
            for choice in chunk["choices"]:
                delta = choice.get("delta") or {}
                content.append(delta.get("content") or "")
                calls = delta.get("tool_calls") or []
                for call in [calls] if isinstance(calls, dict) else calls:
                    name = call["function"]["name"] or name
                    pieces.append(call["function"]["arguments"])
        if not name:
            text = "".join(content)
            parser, parsed = OutputParser(tool_format("llama3_json")), Parsed()
            for piece in content:
                parsed.add(parser.feed(piece))
            parsed.add(parser.finish())
            assert parsed == Parsed(content=text)
            continue
        num_calls += 1
        parser, parsed = OutputParser(tool_format("llama3_json")), Parsed()
        for piece in (f'{{"name": "{name}", "parameters": ', *pieces, "}"):
            parsed.add(parser.feed(piece))
        parsed.add(parser.finish())
        (call,) = parsed.calls
        assert call.name == name
        assert json.loads(call.arguments) == json.loads("".join(pieces).replace("<|eot_id|>", ""))
        assert call.complete
    assert num_calls


def bfcl() -> list[tuple[list[dict[str, Any]], list[tuple[str, dict[str, Any]]]]]:
    """(offered functions, calls) of the cases of a public benchmark of function calling."""
    folder = require(DATA / "struct-bfcl")
    cases = []
    for name in ("BFCL_v4_parallel.json", "BFCL_v4_simple_python.json"):
        answers = {}
        for line in (folder / "possible_answer" / name).read_text().splitlines():
            answer = json.loads(line)
            answers[answer["id"]] = answer["ground_truth"]
        for line in (folder / name).read_text().splitlines()[::4]:
            case = json.loads(line)
            calls = [
                (function, {key: values[0] for key, values in given.items() if values[0] != ""})
                for call in answers[case["id"]]
                for function, given in call.items()
            ]
            cases.append(([{"type": "function", "function": f} for f in case["function"]], calls))
    return cases


def _tagged(name: str, arguments: dict[str, Any]) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def _python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _dsml(name: str, arguments: dict[str, Any]) -> str:
    parameters = "".join(
        f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else json.dumps(value)}</｜DSML｜parameter>\n"
        for key, value in arguments.items()
    )
    return f'<｜DSML｜invoke name="{name}">\n{parameters}</｜DSML｜invoke>\n'


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(part)}" for key, part in value.items()) + "}"
    return "[" + ",".join(map(_gemma, value)) + "]" if isinstance(value, list) else json.dumps(value)


NS = "]<]minimax[>["


def _minimax(value: Any) -> str:
    if isinstance(value, dict):
        return "".join(f"{NS}<{key}>{_minimax(part)}{NS}</{key}>" for key, part in value.items())
    if isinstance(value, list):
        return "".join(f"{NS}<item>{_minimax(part)}{NS}</item>" for part in value)
    return value if isinstance(value, str) else json.dumps(value)


WRITERS: dict[str, Callable[[list[tuple[str, dict[str, Any]]]], str]] = {
    "hermes": lambda calls: "\n".join(
        f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls
    ),
    "llama3_json": lambda calls: "; ".join(json.dumps({"name": n, "parameters": a}) for n, a in calls),
    "mistral": lambda calls: "[TOOL_CALLS]" + json.dumps([{"name": n, "arguments": a} for n, a in calls]),
    "pythonic": lambda calls: f"[{', '.join(_python(n, a) for n, a in calls)}]",
    "qwen3_coder": lambda calls: "\n".join(_tagged(n, a) for n, a in calls),
    "deepseek_v32": lambda calls: (
        f"<｜DSML｜function_calls>\n{''.join(_dsml(n, a) for n, a in calls)}</｜DSML｜function_calls>"
    ),
    "gemma4": lambda calls: "".join(f"<|tool_call>call:{n}{_gemma(a)}<tool_call|>" for n, a in calls),
    "minimax_m3": lambda calls: (
        f"{NS}<tool_call>\n"
        + "".join(f'{NS}<invoke name="{n}">{_minimax(a)}{NS}</invoke>\n' for n, a in calls)
        + f"{NS}</tool_call>"
    ),
    "apertus": lambda calls: f"<|tools_prefix|>{json.dumps([{n: a} for n, a in calls])}<|tools_suffix|>",
    "nemotron": lambda calls: (
        f"<TOOLCALL>{json.dumps([{'name': n, 'arguments': a} for n, a in calls])}</TOOLCALL>"
    ),
}


@pytest.mark.parametrize("tools", WRITERS)
def test_calls_of_a_benchmark_are_read(tools: str) -> None:
    cases = bfcl()
    assert cases
    for offered, calls in cases:
        text = WRITERS[tools](calls)
        whole = parse(text, tools, functions=offered)
        assert [(c.name, json.loads(c.arguments)) for c in whole.calls] == calls
        assert whole.content == ""
        parser, parsed = OutputParser(tool_format(tools), functions=schemas(offered)), Parsed()
        for i in range(0, len(text), 3):
            parsed.add(parser.feed(text[i : i + 3]))
        parsed.add(parser.finish())
        assert parsed == whole
