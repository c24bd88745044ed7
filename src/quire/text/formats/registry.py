"""Formats by name, and the one that a chat template uses.

A new format is a record in the module of its syntax, and a line here. Only the module that is asked for is loaded: the
texts that recognise a format in a template stand here.
"""

from __future__ import annotations

import importlib
import re
from typing import Any, NoReturn, TypeVar

from quire.errors import ConfigError
from quire.text.formats.shapes import JsonCall, ReasoningFormat, ToolFormat

Format = TypeVar("Format", ToolFormat, ReasoningFormat)

# Hints: a template that contains all texts of one of the tuples uses the format.
Hints = tuple[tuple[str, ...], ...]

# Names in order of recognition: a template uses the first format that it fits.
_TOOLS: dict[str, Hints] = {
    "openai": (("<|channel|>", "<|message|>"),),
    "deepseek_v32": (("｜DSML｜", "function_calls>"),),
    "deepseek_v4": (("｜DSML｜", "tool_calls>"),),
    "deepseek_v3": (("<｜tool▁calls▁begin｜>", "```"),),
    "deepseek_v31": (("<｜tool▁calls▁begin｜>",),),
    "kimi_k2": (("<|tool_calls_section_begin|>",),),
    "kimi_k3": (("<|open|>", "<|close|>", "<|sep|>"),),
    "step3": (("steptml:",),),
    "seed_oss": (("<seed:tool_call>",), ("seed:tool_call", "<function=")),
    "qwen3_coder": (("<function=", "<parameter="),),
    "functionary_v31": (("<function=", "</function>"),),
    "functionary_v32": ((">>>all",),),
    "minicpm5": (("<function name=", "<param name="),),
    "minimax_m3": (("]<]minimax[>[",),),
    "minimax_m2": (("minimax:tool_call",),),
    "dots": (("<dots_function_call>",),),
    "k2_horizon": (("<ifm|tool_call>",),),
    "hy_v3": (("<tool_sep>", "<arg_key>"),),
    "glm45": (("<arg_key>", "<tool_call>"),),
    "mistral_v11": (("[TOOL_CALLS]", "[ARGS]"),),
    "mistral": (("[TOOL_CALLS]",),),
    "phi4_mini": (("functools",), ("<|tool|>", "<|/tool|>")),
    "gemma4": (("<|tool_call>call:",), ("<|tool_call>", "<tool_call|>")),
    "functiongemma": (("<start_function_call>",),),
    "granite": (("<|tool_call|>",),),
    "granite_20b_fc": (("<function_call>",),),
    "jamba": (("<tool_calls>[",), ("<tool_calls>\n[",), ("<tool_calls>", "<answer>")),
    "nemotron": (("<TOOLCALL>",),),
    "internlm": (("<|action_start|>", "<|plugin|>"),),
    "lfm2": (("<|tool_call_start|>",), ("<|tool_list_start|>",), ('"List of tools: ["',)),
    "cohere_command3": (("<|START_ACTION|>",),),
    "cohere_command_r": (("Write 'Action:' followed by",), ("Write \\'Action:\\' followed by",)),
    "apertus": (("<|tools_prefix|>",),),
    "gigachat3": (("function call", "<|role_sep|>"), ("<|function_call|>",)),
    "olmo3": (("<function_calls>",),),
    "longcat": (("<longcat_tool_call>",),),
    "ernie45": (("<tool_call>", "<response>"),),
    "hermes": (("<tool_call>",),),
    "xlam": (("xLAM",), ('[{"name": "tool_call_name"',)),
    "pythonic": (("<|python_start|>",), ("[func_name1(",)),
    "llama3_json": (("<|python_tag|>",), ("<|start_header_id|>", '"parameters"')),
}

_REASONING: dict[str, Hints] = {
    "openai_gptoss": (("<|channel|>", "<|message|>"),),
    "functionary_v32": ((">>>all",),),
    "mistral": (("[THINK]", "[/THINK]"),),
    "granite": (("Here is my thought process:",), ("Here's my thought process:",)),
    "granite33": (("<think></think>", "<response></response>"),),
    "seed_oss": (("<seed:think>",), ("seed:think",)),
    "gemma4": (("<|channel>thought",), ("<|channel>", "<channel|>")),
    "cohere_command3": (("<|START_THINKING|>",),),
    "minimax_m2_append_think": (),
    "minimax_m3": (("<mm:think>",), ("mm:think",)),
    "kimi": (("◁think▷",),),
    "k2_horizon": (("<ifm|think>",),),
    "kimi_k3": (("<|open|>", "<|close|>", "<|sep|>"),),
    "apriel": (("[BEGIN FINAL RESPONSE]",),),
    "longcat": (("<longcat_think>",), ("longcat_think",)),
    "apertus": (("<|inner_prefix|>",),),
    "ernie45": (("</think>", "<response>"),),
    "hunyuan_a13b": (("<think>", "<answer>"), ("<think>", "<|extra_0|>")),
    "qwen3": (("<think>",), ("</think>",)),
    "deepseek_r1": (),
}
# _MODULES are those of tool formats; the others are in `objects`.
_MODULES = {
    "named": "openai deepseek_v3 deepseek_v31 kimi_k2 functionary_v31 functionary_v32 mistral_v11 mistral",
    "parameters": "deepseek_v32 deepseek_v4 kimi_k3 step3 seed_oss qwen3_coder minicpm5 minimax_m3 minimax_m2 dots "
    "k2_horizon hy_v3 glm45 longcat",
}
# HERMES is that of Hermes, Qwen2.5, Qwen3, Granite 4, and of templates that show no tools: a JSON object between tags.
HERMES = ToolFormat("hermes", (JsonCall(),), begin=("<tool_call>",), end="</tool_call>", pad="\n", joint="\n")
TOOL_FORMATS, REASONING_FORMATS = tuple(_TOOLS), tuple(_REASONING)

# TOOL_NAMES are names in vLLM and SGLang of formats that have another name here.
TOOL_NAMES = {
    "cohere_command4": "cohere_command3",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4",
    "glm": "glm45",
    "glm47": "glm45",
    "gpt-oss": "openai",
    "gpt_oss": "openai",
    "granite-20b-fc": "granite_20b_fc",
    "granite4": "hermes",
    "hunyuan": "jamba",
    "hunyuan_a13b": "jamba",
    "interns1": "internlm",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "mimo": "qwen3_coder",
    "minimax-m2": "minimax_m2",
    "minimax-m3": "minimax_m3",
    "nemotron_json": "nemotron",
    "phi4_mini_json": "phi4_mini",
    "poolside_v1": "glm45",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
}
REASONING_NAMES = {
    "cohere_command4": "cohere_command3",
    "deepseek-r1": "deepseek_r1",
    "deepseek-v3": "qwen3",
    "deepseek_v3": "qwen3",
    "deepseek_v31": "qwen3",
    "deepseek_v4": "qwen3",
    "exaone4": "qwen3",
    "glm45": "qwen3",
    "glm47": "qwen3",
    "gpt-oss": "openai_gptoss",
    "gpt_oss": "openai_gptoss",
    "granite_thinking_parser": "deepseek_r1",
    "holo2": "qwen3",
    "hy_v3": "qwen3",
    "interns1": "qwen3",
    "kimi_k2": "deepseek_r1",
    "mimo": "qwen3",
    "minimax": "deepseek_r1",
    "minimax-append-think": "minimax_m2_append_think",
    "minimax_m2": "deepseek_r1",
    "nemotron_v3": "deepseek_r1",
    "olmo3": "deepseek_r1",
    "openai": "openai_gptoss",
    "poolside_v1": "qwen3",
    "qwen3-thinking": "deepseek_r1",
    "step3": "deepseek_r1",
    "step3p5": "deepseek_r1",
}

_NO_REASONING = ("none", "identity")  # the second is vLLM's name

_TOOLS_VARIABLE = re.compile(r"\{[{%][^{}]*\btools\b")


def tool_format(name: str, template: str = "", more: tuple[ToolFormat, ...] = ()) -> ToolFormat | None:
    """Find a format by name, also among `more`; "auto" recognises it in the text of a chat template.

    None if "auto" recognises nothing and the template shows tools. A template that shows none has hermes: its model
    calls functions only where a constraint makes it. Raises ConfigError for an unknown name.
    """
    if name == "auto":
        found = _recognised("tools", _TOOLS, template, more)
        if found is not None or _TOOLS_VARIABLE.search(template):
            return found
        name = "hermes"
    own = TOOL_NAMES.get(name, name)
    known = ("auto", *_TOOLS, *TOOL_NAMES, *(form.name for form in more))
    return _given(own, more) or _loaded("tools", own, _TOOLS) or _unknown("--tool-call-parser", name, known)


def reasoning_format(
    name: str, template: str = "", more: tuple[ReasoningFormat, ...] = ()
) -> ReasoningFormat | None:
    """Find a format by name, also among `more`; "auto" recognises it in the text of a chat template.

    None if "auto" recognises nothing, and for "none" or "identity". Raises ConfigError for an unknown name.
    """
    if name in _NO_REASONING:
        return None
    if name == "auto":
        return _recognised("reasoning", _REASONING, template, more)
    own = REASONING_NAMES.get(name, name)
    known = ("auto", *_NO_REASONING, *_REASONING, *REASONING_NAMES, *(form.name for form in more))
    return (
        _given(own, more)
        or _loaded("reasoning", own, _REASONING)
        or _unknown("--reasoning-parser", name, known)
    )


def _recognised(
    folder: str, known: dict[str, Hints], template: str, more: tuple[Format, ...]
) -> Format | None:
    """Find the first format whose hints the template contains: one of `more`, else one of Quire's."""

    def fits(hints: Hints) -> bool:
        return any(all(text in template for text in texts) for texts in hints)

    given = next((form for form in more if fits(form.hints)), None)
    name = next((name for name, hints in known.items() if fits(hints)), "")
    return given or _loaded(folder, name, known)


def _given(name: str, more: tuple[Format, ...]) -> Format | None:
    return next((form for form in reversed(more) if form.name == name), None)


def _loaded(folder: str, name: str, known: dict[str, Hints]) -> Any:
    if name not in known:
        return None
    if (folder, name) == ("tools", "hermes"):
        return HERMES
    if folder == "tools":
        folder += "." + next((own for own, names in _MODULES.items() if name in names.split()), "objects")
    return _given(name, importlib.import_module(f"quire.text.formats.{folder}").FORMATS)


def _unknown(option: str, name: str, known: tuple[str, ...]) -> NoReturn:
    raise ConfigError(f"{option} {name!r} is unknown; choose one of {', '.join(sorted(known))}")
