"""Renders chat messages to one prompt text by the model's template. Knows OpenAI's shapes; no tokens, no Jinja."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, ModelError, RequestError
from quire.files import read_text
from quire.text.template.frames import Answer
from quire.text.template.messages import (
    completed,
    in_turns,
    objects,
    parse_messages,
    parse_tools,
    plain,
    with_text_arguments,
)
from quire.text.template.process import TemplateProcess, refusal
from quire.text.tokenizer import Tokenizer

MAX_TEMPLATE_CHARACTERS = 1 << 20
# Limits of templates that come with a request.
REQUEST_SECONDS = 1.0
REQUEST_MEMORY_MIB = 128
# A render that takes longer than QUICK_SECONDS does not run on an event loop.
QUICK_SECONDS = 0.02
MAX_TURNS = 64  # beginnings of answers that are remembered
# Marks the place where the last message ends in the rendered text.
_END_MARK = "QUIRE_CONTINUES_HERE_7f3a "

# What is tried in turn with messages and tools that a template cannot take as they are.
_CHANGES = (("messages", with_text_arguments), ("tools", completed), ("messages", in_turns))

CONTENT_FORMATS = ("auto", "string", "openai")


class Rendered:
    """A rendered conversation: its `text`, and the `turn` at its end in which the answer begins.

    The turn is what the template writes after the messages, so that nothing in a message is taken for it. With
    continue_final_message it is the part of the last message. It is found when it is asked for.
    """

    def __init__(self, text: str, find_turn: Callable[[], str], continued: bool = False) -> None:
        self.text = text
        self.continued = continued
        self._find_turn = find_turn

    @cached_property
    def turn(self) -> str:
        return self._find_turn()


class ChatTemplate:
    """A model's chat template: one source, or several by name ("default", "tool_use", ...).

    `special_tokens` are variables that the template sees (bos_token, eos_token, ...). `now` is the clock of
    `strftime_now`. `process` renders; None starts one. Raises ModelError if a source is not valid Jinja or too long.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        special_tokens: Mapping[str, Any] | None = None,
        now: Callable[[], datetime] = datetime.now,
        process: TemplateProcess | None = None,
    ) -> None:
        named = {"default": source} if isinstance(source, str) else dict(source)
        if not named:
            raise ModelError("the chat template is empty; pass --chat-template")
        for name, text in named.items():
            if not isinstance(text, str) or len(text) > MAX_TEMPLATE_CHARACTERS:
                raise ModelError(
                    f"chat template {name!r} must be text of at most {MAX_TEMPLATE_CHARACTERS} characters"
                )
        self._process = TemplateProcess() if process is None else process
        self._for_requests: TemplateProcess | None = None
        self._templates = {name: (text, self._process.compile(name, text)) for name, text in named.items()}
        self._special_tokens = dict(special_tokens or {})
        self._now = now
        self.source = "\n".join(named.values())
        # Whether the last render took so short that another one may run on an event loop.
        self.quick = False
        self.content_format = "auto"
        self._turns: set[str] = set()

    @classmethod
    def load(cls, tokenizer: Tokenizer, chosen: str | None = None) -> ChatTemplate:
        """Load the template to serve with: `chosen` (a path, a template, or a name), else the tokenizer's own.

        Raises ModelError if there is none or the file cannot be read, ConfigError if `chosen` means nothing.
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

    @property
    def switches_thinking(self) -> bool:
        """Whether a variable turns reasoning on or off. `thinking` and `reasoning` may be fields of messages."""
        code = re.sub(r"'[^']*'|\"[^\"]*\"", "", " ".join(re.findall(r"\{[{%][^{}]*[%}]\}", self.source)))
        switch = re.search(
            r"\b(enable_thinking|thinking_budget)\b|(if|\b(and|or|not))\s+thinking\b|(?<![.\w])reasoning\s+is\b",
            code,
        )
        return switch is not None

    def of_request(self, source: str) -> ChatTemplate:
        """Make a template that came with a request: same special tokens, tighter limits, a process of its own.

        Raises RequestError if it is not valid. Its renders are for a thread, not for an event loop.
        """
        if self._for_requests is None:
            self._for_requests = TemplateProcess(REQUEST_SECONDS, REQUEST_MEMORY_MIB)
        try:
            return ChatTemplate(source, self._special_tokens, self._now, self._for_requests)
        except ModelError as error:
            raise RequestError(f"chat_template: {error}", "chat_template") from error

    def render(self, *given: Any, **options: Any) -> str:
        """Render the prompt's text alone; takes what `render_prompt` takes."""
        return self.render_prompt(*given, **options).text

    def render_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        content_format: str | None = None,
        **variables: Any,
    ) -> Rendered:
        """Render the prompt's text, special tokens included: encode it without adding any.

        With `continue_final_message` the text ends inside the last message; that excludes `add_generation_prompt`.
        The template sees `variables` (chat_template_kwargs). Content becomes a "string" or a list of parts ("openai");
        "auto" is the form that the template reads. Raises RequestError.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other; set one to false",
                "continue_final_message",
            )
        source, compiled = self._choose(tools)
        form = self.content_format if content_format is None else content_format
        if form not in CONTENT_FORMATS:
            raise RequestError(
                f"chat_template_content_format must be one of {', '.join(CONTENT_FORMATS)}, got {form!r}",
                "chat_template_content_format",
            )
        reads, needs = (
            (compiled.reads_parts, compiled.needs_parts) if form == "auto" else [form == "openai"] * 2
        )
        chat = parse_messages(messages, reads, needs)
        final = _mark_end(chat, messages[-1]) if continue_final_message else None
        seen = {
            **self._special_tokens,
            **plain(variables, "chat_template_kwargs"),
            "messages": chat,
            "tools": parse_tools(tools),
            "documents": objects(documents, "documents"),
            "add_generation_prompt": bool(add_generation_prompt),
        }
        seen, answer = self._render(source, seen)
        if final is not None:
            text = _cut_at_mark(answer.text, final)
            return Rendered(text, lambda: self._continued_turn(source, seen, text, final), True)
        if not add_generation_prompt:
            return Rendered(answer.text, lambda: "")
        return Rendered(answer.text, lambda: self._new_turn(source, seen, answer))

    def _new_turn(self, source: str, seen: dict[str, Any], answer: Answer) -> str:
        """Find what a prompt ends with after its messages.

        That is what follows the place where the template last asked for add_generation_prompt, once a second render,
        without it, has shown that nothing else does. A template that never asks is rendered with a mark.
        """
        text, begins = answer.text, answer.begins
        if begins is None:
            chat = [*seen["messages"][:-1], dict(seen["messages"][-1])]
            _append(chat[-1], _END_MARK.strip())
            marked = self._process.render(source, {**seen, "messages": chat}, self._now()).text
            after = marked.rpartition(_END_MARK.strip())[2]
            return after if len(after) < len(marked) and text.endswith(after) else ""
        turn = text[begins:]
        if turn in self._turns:
            return turn
        other = self._process.render(source, {**seen, "add_generation_prompt": False}, self._now())
        shared = 0 if other.error else _common(text, other.text)
        if shared == begins and len(self._turns) < MAX_TURNS:
            self._turns.add(turn)
        shared = max(begins, shared)
        # What the template writes instead may begin with the same bracket.
        opened = next((mark for mark in ("<|", "<", "[") if text.endswith(mark, begins, shared)), "")
        return text[shared - len(opened) :]

    def _continued_turn(self, source: str, seen: dict[str, Any], text: str, final: str) -> str:
        """Find what follows the other messages in a prompt that ends inside the last one; at least that one's text."""
        earlier = self._process.render(source, {**seen, "messages": seen["messages"][:-1]}, self._now())
        if earlier.text and text.startswith(earlier.text):
            return text[len(earlier.text) :]
        return final.strip()

    def _render(self, source: str, seen: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
        """Render; returns also the variables as the template took them."""
        began = time.monotonic()
        answer = self._process.render(source, seen, self._now())
        for name, change in _CHANGES:
            if not answer.raised or (change is with_text_arguments and answer.raised != "TypeError"):
                continue
            changed = change(seen[name] or [])
            if changed != (seen[name] or []):
                seen = {**seen, name: changed}
                answer = self._process.render(source, seen, self._now())
        self.quick = time.monotonic() - began < QUICK_SECONDS
        if answer.error is not None:
            raise refusal(answer)
        return seen, answer

    def _choose(self, tools: object) -> tuple[str, Answer]:
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            names = ", ".join(sorted(self._templates))
            raise RequestError(f"the model has several chat templates ({names}); choose with --chat-template")
        return self._templates["default"]


def _read_chosen(chosen: str) -> str:
    # A template holds Jinja's braces; anything else can only be meant as a path.
    if "{{" in chosen or "{%" in chosen:
        return chosen
    if not Path(chosen).is_file():
        raise ConfigError(f"the chat template {chosen!r} is neither a file nor text with Jinja in it")
    return read_text(Path(chosen), 4 * MAX_TEMPLATE_CHARACTERS)


def _mark_end(chat: list[dict[str, Any]], given: Mapping[str, Any]) -> str:
    """Put the mark at the end of the last message, which was `given`; returns that message's text."""
    if given.get("content") is None or chat[-1]["content"] == []:
        raise RequestError(
            "continue_final_message needs a last message with text content", "continue_final_message"
        )
    return _append(chat[-1], _END_MARK)


def _append(message: dict[str, Any], mark: str) -> str:
    """Put `mark` at the end of a message's text; returns the text before it."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + mark
        return content
    text = content[-1]["text"] if content else ""
    message["content"] = [*content[:-1], {"type": "text", "text": text + mark}]
    return str(text)


def _common(first: str, second: str) -> int:
    """Count the characters with which both texts begin."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first.startswith(second[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


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
