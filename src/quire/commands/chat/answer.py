"""Answerers of `quire chat`: a model in this process, or a server over HTTP."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from quire.commands.screen import in_words
from quire.errors import ConfigError, PromptTooLongError, QuireError
from quire.llm import LLM
from quire.serve.keys import key_advice
from quire.text.formats.shapes import ReasoningFormat, thinking
from quire.text.output.events import Parsed
from quire.text.output.parser import OutputParser

Message = dict[str, Any]
THINK = "enable_thinking"
BROKEN = "the connection broke off before the answer was complete"
TAGS = ReasoningFormat("qwen3", ("<think>",), ("</think>",))
CONNECT_TIMEOUT = 600.0  # seconds; a long prompt sends nothing for a while


@dataclass(slots=True)
class AnswerPart:
    """A piece of an answer: text, reasoning or the progress of the prompt; the finish reason and the token counts."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    prompt_done: int | None = None  # tokens of the prompt that are computed, before the answer begins


class Answerer(Protocol):
    """Answers conversations.

    `settings` are sampling parameters by their OpenAI and vLLM names, and `enable_thinking` for the chat template.
    """

    @property
    def name(self) -> str: ...
    def answer(self, messages: list[Message], settings: dict[str, Any], more: bool) -> Iterator[AnswerPart]:
        """Yield the answer in pieces. With `more`, continue the last message, which is the assistant's. QuireError."""
        ...

    def count(self, messages: list[Message]) -> tuple[int, int]:
        """Count the tokens of the conversation, and the most that the model takes."""
        ...

    def switches_thinking(self) -> bool | None:
        """Tell whether the chat template can turn reasoning on or off; None if that is not known."""
        ...


class LocalAnswerer:
    """A model in this process."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    @property
    def name(self) -> str:
        return self._llm.name

    def answer(self, messages: list[Message], settings: dict[str, Any], more: bool) -> Iterator[AnswerPart]:
        given, variables = _split(settings)
        prompt, parser, special = self._llm.chat_prompt(messages, more, variables)
        given = {"skip_special_tokens": not special, "return_progress": True, **given}
        shown = 0
        outputs = self._llm.stream(prompt, self._llm.default_params(**given))
        yield AnswerPart(prompt_tokens=len(prompt["prompt_token_ids"]), prompt_done=0)
        for output in outputs:
            sample, parsed = output.outputs[0], Parsed()
            parsed.add(parser.feed(sample.text[shown:]))
            if sample.finish_reason is not None:
                parsed.add(parser.finish())
            shown = len(sample.text)
            counts = len(output.prompt_token_ids or ()), len(sample.token_ids)
            done = None if sample.token_ids else output.num_computed_tokens
            yield AnswerPart(parsed.content, parsed.reasoning, sample.finish_reason, *counts, done)

    def count(self, messages: list[Message]) -> tuple[int, int]:
        return len(self._llm.chat_token_ids(messages)), self._llm.max_model_len

    def switches_thinking(self) -> bool | None:
        return self._llm.switches_thinking()


class RemoteAnswerer:
    """A server with OpenAI's API at `url`. An empty `model` means the first that it lists. QuireError."""

    def __init__(self, url: str, api_key: str | None, model: str) -> None:
        self._base = url.rstrip("/").removesuffix("/v1")
        if not self._base.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url!r} must begin with http:// or https://")
        self._key = api_key
        try:
            listed = json.load(self._open("/v1/models", None))["data"]
        except (QuireError, ValueError, KeyError, TypeError) as error:
            raise QuireError(f"--url {url}: {error}") from error
        names = [entry["id"] for entry in listed]
        if model and model not in names:
            raise ConfigError(f"--url {url} serves {', '.join(names)}, not {model}")
        self.name: str = model or names[0]
        self._longest = int(listed[0].get("max_model_len") or 0)
        owner = listed[0].get("owned_by")
        self._extras = {"return_progress": True} if owner in ("quire", "llamacpp") else {}
        self._reports = {"include_usage": True}
        if owner in ("quire", "vllm", "sglang"):  # tokens of reasoning are counted as they come
            self._reports["continuous_usage_stats"] = True

    def answer(self, messages: list[Message], settings: dict[str, Any], more: bool) -> Iterator[AnswerPart]:
        given, variables = _split(settings)
        body = {"messages": messages, **self._extras, **given}
        if variables:
            body["chat_template_kwargs"] = variables
        if more:
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        return self._pieces("/v1/chat/completions", body)

    def complete(self, prompt: str, settings: dict[str, Any]) -> Iterator[AnswerPart]:
        """Yield the text that follows `prompt` in pieces, with reasoning between think tags apart. QuireError."""
        form, place = TAGS.of_text(prompt)
        parser = OutputParser(None, form, None, place)
        for piece in self._pieces("/v1/completions", {"prompt": prompt, **settings}):
            parsed = Parsed(reasoning=piece.reasoning)
            parsed.add(parser.feed(piece.text))
            yield replace(piece, text=parsed.content, reasoning=parsed.reasoning)
        rest = Parsed()
        rest.add(parser.finish())
        yield AnswerPart(rest.content, rest.reasoning)

    def _pieces(self, path: str, body: dict[str, Any]) -> Iterator[AnswerPart]:
        body = {"model": self.name, "stream": True, "stream_options": self._reports, **body}
        finish: str | None = None
        done = False
        for data in self._events(path, body):
            done = done or data == "[DONE]"
            if not data or data.startswith(":") or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise QuireError(str(event["error"].get("message", event["error"])))
            choice = (event.get("choices") or [{}])[0]
            finish = choice.get("finish_reason") or finish
            usage = event.get("usage") or {}
            delta = choice.get("delta") or choice
            text = choice.get("text") or delta.get("content") or ""
            reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
            tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
            progress = event.get("prompt_progress") or {}
            if progress:
                yield AnswerPart(prompt_tokens=progress["total"], prompt_done=progress["processed"])
            elif text or reasoning or usage:
                yield AnswerPart(text, reasoning, finish, *tokens)
        if finish is None and not done:
            raise QuireError(BROKEN)

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[str]:
        """Yield the data of a stream's events. QuireError if the connection breaks."""
        try:
            for line in self._open(path, body):
                yield line.decode("utf-8", "replace").strip().removeprefix("data:").strip()
        except (OSError, http.client.HTTPException) as error:
            raise QuireError(f"{BROKEN}: {in_words(error)}") from error

    def count(self, messages: list[Message]) -> tuple[int, int]:
        body = {"model": self.name, "messages": messages}
        return int(json.load(self._open("/tokenize", body))["count"]), self._longest

    def switches_thinking(self) -> bool | None:
        return None

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"})
        if self._key:  # not for where a redirection leads
            request.add_unredirected_header("Authorization", f"Bearer {self._key}")
        try:
            return urllib.request.urlopen(request, timeout=CONNECT_TIMEOUT)
        except urllib.error.HTTPError as error:
            raise QuireError(key_advice(self._key)) if error.code == 401 else _refusal(error) from error
        except OSError as error:
            reason = getattr(error, "reason", error)
            said = in_words(reason) if isinstance(reason, OSError) else reason
            raise QuireError(f"the server does not answer: {said}") from error


def _split(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tell sampling parameters from variables of the chat template."""
    given = dict(settings)
    think = given.pop(THINK, None)
    return given, {} if think is None else thinking(think)


def _refusal(error: urllib.error.HTTPError) -> QuireError:
    """Make the error that a server's answer means, in its own words."""
    try:
        told = json.load(error)["error"]
        message = str(told["message"])
    except (ValueError, KeyError, TypeError):
        return QuireError(f"the server answered {error.code} {error.reason}")
    if told.get("code") == "context_length_exceeded":
        return PromptTooLongError(message, 0, 0)
    return QuireError(message)
