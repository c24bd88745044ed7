"""Formats of tool calls and reasoning in models' output, as data: markers and argument syntax. Knows no parser.

A format is one entry; `text/tools.py` reads it, `text/tool_tags.py` writes the constraint that yields it. Sources are
the chat templates of the models named, whose history messages show what the model itself writes.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class JsonCall:
    """`{"name": NAME, "arguments": {...}}`; where `listed`, written as a list of such. Both are always read."""

    key: str = "arguments"
    listed: bool = False


@dataclass(frozen=True, slots=True)
class NamedCall:
    """NAME, one of `between`, JSON arguments, `after`. `before` may precede the name, `aside` and a word follow it.

    `prefix` and a number after a colon (`numbered`) are no part of the function's name.
    """

    between: tuple[str, ...]
    before: str = ""
    after: str = ""
    aside: str = ""
    prefix: str = ""
    numbered: bool = False
    pad: str = ""


@dataclass(frozen=True, slots=True)
class PythonCall:
    """`[NAME(key=value, ...), ...]` with Python's literals."""


@dataclass(frozen=True, slots=True)
class ParameterCall:
    """A name, then each argument between tags. Texts stand for themselves; other values are JSON.

    `before` NAME `name_end`, then for each argument `key_begin` KEY `key_end` VALUE `value_end`, then `after`.
    Beside a value, `pad` belongs to the tags.
    """

    key_begin: str
    key_end: tuple[str, ...]
    value_end: str
    before: str = ""
    name_end: str = ""
    after: str = ""
    pad: str = ""


Body = JsonCall | NamedCall | PythonCall | ParameterCall


@dataclass(frozen=True, slots=True)
class Channels:
    """Messages with headers, as gpt-oss writes them (OpenAI's harmony format).

    `start` ROLE `channel` NAME [to=RECIPIENT] `message` TEXT and one of `ends`. The prompt ends after the role.
    """

    start: str = "<|start|>"
    channel: str = "<|channel|>"
    message: str = "<|message|>"
    ends: tuple[str, ...] = ("<|end|>", "<|return|>", "<|call|>")
    reasoning: str = "analysis"
    calls: str = "functions."


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes tool calls.

    A call is one of `begin`, a body, `end`. It may also begin without, at one of `bare`, and is written so unless
    `marked`. Calls may be inside `section` (begin, end). `separators` are characters that may stand between calls.
    Of `bodies` the first is what a constraint writes, with `pad` beside the markers and `joint` between calls.
    `call_id` is a template with {hex}, {hex9}, {name} and {index}. `hints`: a chat template that has all texts of
    one of them is of this format.
    """

    name: str
    bodies: tuple[Body, ...]
    begin: tuple[str, ...] = ()
    end: str = ""
    section: tuple[str, str] | None = None
    bare: tuple[str, ...] = ()
    marked: bool = True
    separators: str = ""
    pad: str = ""
    joint: str = ""
    channels: Channels | None = None
    call_id: str = "call_{hex}"
    hints: tuple[tuple[str, ...], ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that may be special tokens of the model."""
        found = [*self.begin, self.end, *(self.section or ())]
        if self.channels is not None:
            found += [self.channels.start, self.channels.channel, self.channels.message, *self.channels.ends]
        for body in self.bodies:
            if isinstance(body, NamedCall):
                found += [*body.between, body.aside]
        return tuple(marker for marker in found if marker)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model sets its reasoning apart: one of `begin`, text, one of `end`, before anything else.

    `opened`: where the prompt does not tell, the output begins inside the reasoning.
    """

    name: str
    begin: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    opened: bool = False
    channels: Channels | None = None
    hints: tuple[tuple[str, ...], ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.begin, *self.end)

    def closed_by(self, prompt: str) -> bool:
        """Whether an answer to `prompt` begins behind the reasoning, which is empty then."""
        return bool(self.end) and prompt[-256:].rstrip().endswith(self.end)

    def opened_by(self, prompt: str) -> bool:
        """Whether an answer to `prompt` begins inside the reasoning."""
        if self.begin and prompt[-256:].rstrip().endswith(self.begin):
            return True
        return self.opened and not self.closed_by(prompt)


_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL = ("<｜tool▁call▁begin｜>",)
_JSON = JsonCall()
_MISTRAL_NAMED = NamedCall(between=("[ARGS]", ""), aside="[CALL_ID]")

# In order of recognition: the first whose hints a template has.
TOOL_FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat("openai", (), channels=Channels(), hints=(("<|channel|>", "<|message|>"),)),
    ToolFormat(
        "deepseek_v3",
        (NamedCall(before="function<｜tool▁sep｜>", between=("```json",), after="```", pad="\n"),),
        begin=_DEEPSEEK_CALL,
        end="<｜tool▁call▁end｜>",
        section=_DEEPSEEK,
        joint="\n",
        hints=((_DEEPSEEK[0], "```"),),
    ),
    ToolFormat(
        "deepseek_v31",
        (NamedCall(between=("<｜tool▁sep｜>",)),),
        begin=_DEEPSEEK_CALL,
        end="<｜tool▁call▁end｜>",
        section=_DEEPSEEK,
        hints=((_DEEPSEEK[0],),),
    ),
    ToolFormat(
        "kimi_k2",
        (NamedCall(between=("<|tool_call_argument_begin|>",), prefix="functions.", numbered=True),),
        begin=("<|tool_call_begin|>",),
        end="<|tool_call_end|>",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        call_id="functions.{name}:{index}",
        hints=(("<|tool_calls_section_begin|>",),),
    ),
    ToolFormat(
        "seed_oss",
        (
            ParameterCall(
                before="<function=",
                name_end=">",
                key_begin="<parameter=",
                key_end=(">",),
                value_end="</parameter>",
                after="</function>",
            ),
        ),
        begin=("<seed:tool_call>",),
        end="</seed:tool_call>",
        pad="\n",
        joint="\n",
        hints=(("<seed:tool_call>",), ("seed:tool_call", "<function=")),
    ),
    ToolFormat(
        "qwen3_coder",
        (
            ParameterCall(
                before="<function=",
                name_end=">",
                key_begin="<parameter=",
                key_end=(">",),
                value_end="</parameter>",
                after="</function>",
                pad="\n",
            ),
        ),
        begin=("<tool_call>",),
        end="</tool_call>",
        bare=("<function=",),
        pad="\n",
        joint="\n",
        hints=(("<function=", "<parameter="),),
    ),
    ToolFormat(
        "functionary_v31",
        (NamedCall(between=(">",)),),
        begin=("<function=",),
        end="</function>",
        joint="\n",
        hints=(("<function=", "</function>"),),
    ),
    ToolFormat(
        "glm45",
        (
            ParameterCall(
                key_begin="<arg_key>", key_end=("</arg_key>", "<arg_value>"), value_end="</arg_value>"
            ),
        ),
        begin=("<tool_call>",),
        end="</tool_call>",
        joint="\n",
        hints=(("<arg_key>", "<tool_call>"),),
    ),
    ToolFormat(
        "mistral_v11",
        (_MISTRAL_NAMED, _JSON),
        begin=("[TOOL_CALLS]",),
        call_id="{hex9}",
        hints=(("[TOOL_CALLS]", "[ARGS]"),),
    ),
    ToolFormat(
        "mistral",
        (JsonCall(listed=True), _MISTRAL_NAMED),
        begin=("[TOOL_CALLS]",),
        call_id="{hex9}",
        hints=(("[TOOL_CALLS]",),),
    ),
    ToolFormat(
        "phi4_mini",
        (JsonCall(listed=True),),
        begin=("functools", "<|tool_call|>"),
        end="<|/tool_call|>",
        hints=(("functools",), ("<|tool|>", "<|/tool|>")),
    ),
    ToolFormat(
        "granite",
        (JsonCall(listed=True),),
        begin=("<|tool_call|>", "<tool_call>"),
        bare=("[",),
        hints=(("<|tool_call|>",),),
    ),
    ToolFormat(
        "granite_20b_fc",
        (_JSON,),
        begin=("<function_call>",),
        joint=" ",
        pad=" ",
        hints=(("<function_call>",),),
    ),
    ToolFormat(
        "jamba",
        (JsonCall(listed=True),),
        begin=("<tool_calls>",),
        end="</tool_calls>",
        hints=(("<tool_calls>[",), ("<tool_calls>\n[",)),
    ),
    ToolFormat(
        "internlm",
        (JsonCall(key="parameters"),),
        begin=("<|action_start|><|plugin|>",),
        end="<|action_end|>",
        pad="\n",
        hints=(("<|action_start|>", "<|plugin|>"),),
    ),
    ToolFormat(
        "lfm2",
        (PythonCall(),),
        begin=("<|tool_call_start|>",),
        end="<|tool_call_end|>",
        hints=(("<|tool_call_start|>",), ("<|tool_list_start|>",)),
    ),
    ToolFormat(
        "hermes",
        (_JSON,),
        begin=("<tool_call>",),
        end="</tool_call>",
        pad="\n",
        joint="\n",
        hints=(("<tool_call>",),),
    ),
    ToolFormat(
        "pythonic",
        (PythonCall(),),
        begin=("<|python_start|>", "<|python_tag|>"),
        end="<|python_end|>",
        bare=("[",),
        marked=False,
        hints=(("<|python_start|>",), ("[func_name1(",)),
    ),
    ToolFormat(
        "llama3_json",
        (JsonCall(key="parameters"),),
        begin=("<|python_tag|>",),
        bare=("{", "["),
        marked=False,
        separators=";,",
        joint="; ",
        hints=(("<|python_tag|>",), ("<|start_header_id|>", '"parameters"')),
    ),
)

_THINK = (("<think>",), ("</think>",))
_SAID = ("Here is my {}:", "Here's my {}:")

REASONING_FORMATS: tuple[ReasoningFormat, ...] = (
    ReasoningFormat("openai_gptoss", channels=Channels(), hints=(("<|channel|>", "<|message|>"),)),
    ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",), hints=(("[THINK]", "[/THINK]"),)),
    ReasoningFormat(
        "granite",
        tuple(s.format("thought process") for s in _SAID),
        tuple(s.format("response") for s in _SAID),
        hints=tuple((s.format("thought process"),) for s in _SAID),
    ),
    ReasoningFormat(
        "seed_oss", ("<seed:think>",), ("</seed:think>",), hints=(("<seed:think>",), ("seed:think",))
    ),
    ReasoningFormat("qwen3", *_THINK, hints=(("<think>",), ("</think>",))),
    ReasoningFormat("deepseek_r1", *_THINK, opened=True),
    ReasoningFormat("none"),
)

# vLLM's names for what is here under another.
TOOL_NAMES = {
    "phi4_mini_json": "phi4_mini",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "granite-20b-fc": "granite_20b_fc",
    "granite4": "hermes",
    "qwen3_xml": "qwen3_coder",
    "gpt_oss": "openai",
    "glm47": "glm45",
    "qwen25": "hermes",
    "qwen": "hermes",
}
REASONING_NAMES = {
    "gpt_oss": "openai_gptoss",
    "openai": "openai_gptoss",
    "glm45": "qwen3",
    "deepseek_v3": "qwen3",
    "deepseek-r1": "deepseek_r1",
    "hunyuan_a13b": "qwen3",
}


def tool_format(name: str, template: str = "") -> ToolFormat:
    """The format of that name; "auto" is recognised from a chat template's text, or else hermes. ConfigError."""
    if name == "auto":
        name = _recognised(TOOL_FORMATS, template) or "hermes"
    name = TOOL_NAMES.get(name, name)
    found = next((entry for entry in TOOL_FORMATS if entry.name == name), None)
    if found is None:
        names = ", ".join(sorted(["auto", *(entry.name for entry in TOOL_FORMATS), *TOOL_NAMES]))
        raise ConfigError(f"--tool-call-parser {name!r} is not known; choose one of {names}")
    return found


def reasoning_format(name: str, template: str = "") -> ReasoningFormat | None:
    """The format of that name, None for "none"; "auto" is recognised from a chat template's text. ConfigError."""
    if name == "auto":
        name = _recognised(REASONING_FORMATS, template) or "none"
    name = REASONING_NAMES.get(name, name)
    found = next((entry for entry in REASONING_FORMATS if entry.name == name), None)
    if found is None:
        names = ", ".join(sorted(["auto", *(e.name for e in REASONING_FORMATS), *REASONING_NAMES]))
        raise ConfigError(f"--reasoning-parser {name!r} is not known; choose one of {names}")
    return None if found.name == "none" else found


def _recognised(entries: tuple[ToolFormat, ...] | tuple[ReasoningFormat, ...], template: str) -> str | None:
    for entry in entries:
        if any(all(text in template for text in texts) for texts in entry.hints):
            return entry.name
    return None
