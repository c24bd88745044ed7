"""Chat messages to one prompt text, through the model's Jinja template. Knows OpenAI's shapes, no tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes

from quire.errors import ModelError, RequestError
from quire.text.template.messages import objects, parse_messages, plain, with_text_arguments
from quire.text.template.sandbox import SandboxedTemplates
from quire.text.tokenizer import Tokenizer
from quire.text.vocab import read_text

MAX_TEMPLATE_CHARACTERS = 1 << 20
# Marks the place where a final message that is to be continued ends in the rendered text.
_END_MARK = "QUIRE_CONTINUES_HERE_7f3a "


class ChatTemplate:
    """A model's chat template: one source, or several by name ("default", "tool_use", ...).

    `special_tokens` are variables the template sees (bos_token, eos_token, ...). `now` is the clock of
    `strftime_now`. Raises ModelError where a source is not valid Jinja or too long.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        special_tokens: Mapping[str, Any] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        named = {"default": source} if isinstance(source, str) else dict(source)
        if not named:
            raise ModelError("the chat template is empty; pass --chat-template")
        self._environment = SandboxedTemplates(now)
        self._templates = {name: _Compiled(self._environment, name, text) for name, text in named.items()}
        self._special_tokens = dict(special_tokens or {})
        self.source = "\n".join(named.values())

    @classmethod
    def load(cls, tokenizer: Tokenizer, chosen: str | None = None) -> ChatTemplate:
        """The template to serve with: `chosen` (a path, a template, or a name) before the tokenizer's own.

        Raises ModelError where there is none or the file cannot be read.
        """
        own = tokenizer.chat_template
        if chosen is not None:
            if isinstance(own, dict) and chosen in own:
                return cls(own[chosen], tokenizer.special_tokens)
            return cls(_read_chosen(chosen), tokenizer.special_tokens)
        if own is None:
            raise ModelError(
                "the model has no chat template; pass one with --chat-template FILE, or use completions"
            )
        return cls(own, tokenizer.special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt's text, special tokens included: encode it without adding any.

        With `continue_final_message` the text ends inside the last message, to be carried on; that excludes
        `add_generation_prompt`. `variables` (chat_template_kwargs) are seen by it. Raises RequestError.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other; set one to false",
                "continue_final_message",
            )
        template = self._choose(tools)
        chat = parse_messages(messages, template.reads_parts, template.needs_parts)
        final = _mark_end(chat) if continue_final_message else None
        seen = {
            **self._special_tokens,
            **plain(variables, "chat_template_kwargs"),
            "messages": chat,
            "tools": objects(tools, "tools") or None,
            "documents": objects(documents, "documents"),
            "add_generation_prompt": bool(add_generation_prompt),
        }
        text = self._render(template, seen)
        return text if final is None else _cut_at_mark(text, final)

    def _render(self, template: _Compiled, seen: dict[str, Any]) -> str:
        try:
            return _render(self._environment, template.compiled, seen)
        except RequestError as error:
            chat = with_text_arguments(seen["messages"])
            if "TypeError" not in str(error) or chat == seen["messages"]:
                raise
            return _render(self._environment, template.compiled, {**seen, "messages": chat})

    def _choose(self, tools: object) -> _Compiled:
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            names = ", ".join(sorted(self._templates))
            raise RequestError(f"the model has several chat templates ({names}); choose with --chat-template")
        return self._templates["default"]


class _Compiled:
    """One template with what its source tells about the content it expects.

    `reads_parts`: it goes through a message's content as a list of parts. `needs_parts`: and it never asks
    whether that content is a string.
    """

    def __init__(self, environment: SandboxedTemplates, name: str, source: str) -> None:
        if not isinstance(source, str) or len(source) > MAX_TEMPLATE_CHARACTERS:
            raise ModelError(
                f"chat template {name!r} must be text of at most {MAX_TEMPLATE_CHARACTERS} characters"
            )
        try:
            tree = environment.parse(source)
            self.compiled = environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"chat template {name!r}, line {error.lineno}: {error.message}") from error
        except (RecursionError, SyntaxError, ValueError, jinja2.TemplateError) as error:
            raise ModelError(f"chat template {name!r} cannot be compiled: {error}") from error
        self.reads_parts = _loops_over_content(tree)
        tests = {test.name for test in tree.find_all(nodes.Test)}
        self.needs_parts = self.reads_parts and not tests & {"string", "iterable", "sequence", "mapping"}


def _read_chosen(chosen: str) -> str:
    # A template holds Jinja's braces; anything else can only be meant as a path.
    if "{{" in chosen or "{%" in chosen:
        return chosen
    if not Path(chosen).is_file():
        raise ModelError(f"--chat-template {chosen!r} is neither a file nor a Jinja template")
    return read_text(Path(chosen))


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    while isinstance(node, nodes.Filter):
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether some loop runs over a message's content, also through variables and macro parameters."""
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    names: set[str] = set()
    while True:
        before = len(names)
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
                names.add(assign.target.name)
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name in macros:
                given = zip(macros[call.node.name].args, call.args, strict=False)
                names.update(param.name for param, arg in given if _is_content(arg, names))
        if len(names) == before:
            break
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _render(environment: SandboxedTemplates, template: jinja2.Template, seen: dict[str, Any]) -> str:
    try:
        return environment.run(template, seen)
    except jinja2.TemplateError as error:
        raise RequestError(f"the chat template refuses these messages: {error}", "messages") from error
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        what = f"{type(error).__name__}: {error}"
        raise RequestError(f"the chat template fails on these messages: {what}", "messages") from error


def _mark_end(chat: list[dict[str, Any]]) -> str:
    """Put the mark at the end of the last message; give that message's text."""
    content = chat[-1].get("content")
    if isinstance(content, list) and content:
        final: str = content[-1]["text"]
        content[-1]["text"] = final + _END_MARK
        return final
    if not isinstance(content, str):
        raise RequestError(
            "continue_final_message needs a last message with text content", "continue_final_message"
        )
    chat[-1]["content"] = content + _END_MARK
    return content


def _cut_at_mark(text: str, final: str) -> str:
    mark = _END_MARK.strip()
    at = text.rfind(mark)
    if at < 0 or final.strip() not in text:
        raise RequestError(
            "continue_final_message cannot be used: the chat template changes or drops the last message",
            "continue_final_message",
        )
    # A template that trimmed the mark's space trims the ends of messages, so the text must end trimmed too.
    return text[:at] if text.startswith(_END_MARK, at) else text[:at].rstrip()
