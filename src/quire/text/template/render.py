"""Renders chat messages to one prompt text by the model's template. Knows OpenAI's shapes; no tokens, no Jinja."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from quire.errors import ModelError, RequestError
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
# Marks the place where a final message that is to be continued ends in the rendered text.
_END_MARK = "QUIRE_CONTINUES_HERE_7f3a "


# What is tried in turn with messages and tools that a template cannot take as they are.
_CHANGES = (("messages", with_text_arguments), ("tools", completed), ("messages", in_turns))

CONTENT_FORMATS = ("auto", "string", "openai")


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

    @classmethod
    def load(cls, tokenizer: Tokenizer, chosen: str | None = None) -> ChatTemplate:
        """Load the template to serve with: `chosen` (a path, a template, or a name), else the tokenizer's own.

        Raises ModelError if there is none or the file cannot be read.
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

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        content_format: str | None = None,
        **variables: Any,
    ) -> str:
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
        text = self._render(source, seen)
        return text if final is None else _cut_at_mark(text, final)

    def _render(self, source: str, seen: dict[str, Any]) -> str:
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
        return answer.text

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
        raise ModelError(f"--chat-template {chosen!r} is neither a file nor a Jinja template")
    return read_text(Path(chosen), 4 * MAX_TEMPLATE_CHARACTERS)


def _mark_end(chat: list[dict[str, Any]], given: Mapping[str, Any]) -> str:
    """Put the mark at the end of the last message, which was `given`; returns that message's text."""
    content = chat[-1].get("content")
    if isinstance(content, list) and content:
        final: str = content[-1]["text"]
        content[-1]["text"] = final + _END_MARK
        return final
    if not isinstance(content, str) or given.get("content") is None:
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
