"""Chat messages to one prompt text, through the model's Jinja template. Knows OpenAI's shapes, no tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes

from quire.errors import ModelError, RequestError
from quire.text.sandbox import SandboxedTemplates
from quire.text.tokenizer import Tokenizer, check_text
from quire.text.vocab import read_text

MAX_TEMPLATE_CHARACTERS = 1 << 20
MAX_MESSAGES = 100_000
MAX_DEPTH = 64
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
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
        if not template.asks_for_none:
            for message in chat:
                if message.get("content", 0) is None:
                    message["content"] = ""
        seen = {
            **self._special_tokens,
            **_plain(variables, "chat_template_kwargs"),
            "messages": chat,
            "tools": _objects(tools, "tools") or None,
            "documents": _objects(documents, "documents"),
            "add_generation_prompt": bool(add_generation_prompt),
        }
        text = _render(self._environment, template.compiled, seen)
        return text if final is None else _cut_at_mark(text, final)

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
    whether that content is a string. `asks_for_none`: it asks whether content is null, so null is not given as "".
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
        self.asks_for_none = any(
            t.name == "none" and _is_content(t.node, set()) for t in tree.find_all(nodes.Test)
        )
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


def _plain(value: Any, param: str, depth: int = 0) -> Any:
    """A copy made of JSON's types alone, so that a template can reach nothing else."""
    if depth > MAX_DEPTH:
        raise RequestError(f"{param} is nested deeper than {MAX_DEPTH}", param)
    if value is None or type(value) in (int, float, bool):
        return value
    if isinstance(value, str):
        check_text(value, param)
        return str.__str__(value)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise RequestError(f"{param} must have strings as keys", param)
        return {_plain(k, param): _plain(v, param, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, param, depth + 1) for item in value]
    raise RequestError(f"{param} holds a {type(value).__name__}; only JSON values can be given", param)


def _objects(values: Sequence[Mapping[str, Any]] | None, param: str) -> list[dict[str, Any]] | None:
    if values is None:
        return None
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, Mapping) for v in values):
        raise RequestError(f"{param} must be a list of objects", param)
    return [_plain(value, f"{param}[{i}]") for i, value in enumerate(values)]


def parse_messages(
    messages: Sequence[Mapping[str, Any]], keep_parts: bool = False, wrap_text: bool = False
) -> list[dict[str, Any]]:
    """Check messages of OpenAI's shape and copy them into what templates read. Raises RequestError.

    Content given as text parts is joined by newlines, or kept as parts with `keep_parts`; with `wrap_text`
    content given as a string becomes one part. Tool calls' arguments become objects. Reasoning is given under
    each of the names that templates use.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError("messages must be a list with at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"messages must be at most {MAX_MESSAGES}", "messages")
    chat: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{where} must be an object with role and content", where)
        copy = _plain(message, where)
        if copy.get("role") not in ROLES:
            raise RequestError(
                f"{where}.role must be one of {', '.join(ROLES)}, got {copy.get('role')!r}", f"{where}.role"
            )
        _put_content(copy, where, keep_parts, wrap_text)
        _put_tool_calls(copy, where)
        reasoning = next((copy[name] for name in _REASONING if copy.get(name) is not None), None)
        if reasoning is not None:
            copy = {"thinking": reasoning, **copy, "reasoning_content": reasoning}
        chat.append(copy)
    return chat


def _put_content(message: dict[str, Any], where: str, keep_parts: bool, wrap_text: bool) -> None:
    where = f"{where}.content"
    content = message.get("content")
    if content is None:
        if message["role"] != "assistant":
            raise RequestError(f"{where} is required for role {message['role']}", where)
        return
    if isinstance(content, str):
        if wrap_text:
            message["content"] = [{"type": "text", "text": content}]
        return
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of text parts", where)
    texts = [_part_text(part, f"{where}[{i}]") for i, part in enumerate(content)]
    message["content"] = [{"type": "text", "text": t} for t in texts] if keep_parts else "\n".join(texts)


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind not in _TEXT_PARTS:
        raise RequestError(f"{where} must be a text part; {kind!r} is not supported by this model", where)
    text = part.get(_TEXT_PARTS[str(kind)])
    if not isinstance(text, str):
        raise RequestError(f"{where}.{_TEXT_PARTS[str(kind)]} must be a string", where)
    return text


def _put_tool_calls(message: dict[str, Any], where: str) -> None:
    calls = message.get("tool_calls")
    if not calls:
        message.pop("tool_calls", None)
        return
    where = f"{where}.tool_calls"
    if not isinstance(calls, list) or message["role"] != "assistant":
        raise RequestError(f"{where} must be a list, in an assistant message", where)
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(
                f"{where}[{i}].function must be an object with a name", f"{where}[{i}].function"
            )
        arguments = function.get("arguments")
        if isinstance(arguments, str) and arguments.strip():
            param = f"{where}[{i}].function.arguments"
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                raise RequestError(f"{param} is not valid JSON: {error}", param) from error
            arguments = _plain(arguments, param)
        function["arguments"] = arguments or {}


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
