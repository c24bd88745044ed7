"""All formats by name, and the one that a chat template uses. A new format is a file of data and a line here."""

from __future__ import annotations

import importlib
import re
from typing import TypeVar

from quire.errors import ConfigError
from quire.text.formats.shapes import ReasoningFormat, ToolFormat

Format = TypeVar("Format", ToolFormat, ReasoningFormat)

# Modules in order of recognition: a template uses the first format whose hints it contains.
_TOOLS = (
    "openai",
    "deepseek_v32",
    "deepseek_v4",
    "deepseek_v3",
    "deepseek_v31",
    "kimi_k2",
    "kimi_k3",
    "step3",
    "seed_oss",
    "qwen3_coder",
    "functionary_v31",
    "functionary_v32",
    "minicpm5",
    "minimax_m3",
    "minimax_m2",
    "hy_v3",
    "glm45",
    "mistral_v11",
    "mistral",
    "phi4_mini",
    "gemma4",
    "functiongemma",
    "granite",
    "granite_20b_fc",
    "jamba",
    "nemotron",
    "internlm",
    "lfm2",
    "cohere_command3",
    "cohere_command_r",
    "apertus",
    "gigachat3",
    "olmo3",
    "longcat",
    "ernie45",
    "hermes",
    "xlam",
    "pythonic",
    "llama3_json",
)

_REASONING = (
    "openai_gptoss",
    "functionary_v32",
    "mistral",
    "granite",
    "granite33",
    "seed_oss",
    "gemma4",
    "cohere_command3",
    "minimax_m2_append_think",
    "minimax_m3",
    "kimi",
    "kimi_k3",
    "apriel",
    "longcat",
    "apertus",
    "ernie45",
    "hunyuan_a13b",
    "qwen3",
    "deepseek_r1",
)
TOOL_FORMATS: tuple[ToolFormat, ...] = tuple(
    importlib.import_module(f"quire.text.formats.tools.{name}").FORMAT for name in _TOOLS
)
REASONING_FORMATS: tuple[ReasoningFormat, ...] = tuple(
    importlib.import_module(f"quire.text.formats.reasoning.{name}").FORMAT for name in _REASONING
)

# Names in vLLM and SGLang of formats that have another name here.
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
    """The format of that name; "auto" recognises it in the text of a chat template.

    None if "auto" recognises nothing and the template shows tools. A template that shows none has hermes: its model
    calls functions only where a constraint makes it. Raises ConfigError for an unknown name.
    """
    if name == "auto":
        found = _recognised((*more, *TOOL_FORMATS), template)
        if found is not None or _TOOLS_VARIABLE.search(template):
            return found
        name = "hermes"
    return _named((*TOOL_FORMATS, *more), TOOL_NAMES, name, "--tool-call-parser", ["auto"])


def reasoning_format(
    name: str, template: str = "", more: tuple[ReasoningFormat, ...] = ()
) -> ReasoningFormat | None:
    """The format of that name; "auto" recognises it in the text of a chat template, "none" (or "identity") is None.

    Raises ConfigError for an unknown name.
    """
    if name in _NO_REASONING:
        return None
    if name == "auto":
        return _recognised((*more, *REASONING_FORMATS), template)
    return _named(
        (*REASONING_FORMATS, *more), REASONING_NAMES, name, "--reasoning-parser", ["auto", *_NO_REASONING]
    )


def _named(
    formats: tuple[Format, ...], others: dict[str, str], name: str, option: str, more: list[str]
) -> Format:
    known: dict[str, Format] = {form.name: form for form in formats}
    found = known.get(others.get(name, name))
    if found is None:
        names = ", ".join(sorted([*more, *known, *others]))
        raise ConfigError(f"{option} {name!r} is unknown; choose one of {names}")
    return found


def _recognised(formats: tuple[Format, ...], template: str) -> Format | None:
    for form in formats:
        if any(all(text in template for text in texts) for texts in form.hints):
            return form
    return None
