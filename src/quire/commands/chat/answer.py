"""Answerers of `quire chat`: a model in this process, or a server over HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from quire.errors import ConfigError, QuireError
from quire.llm import LLM

Message = dict[str, Any]
CONNECT_TIMEOUT = 600.0  # seconds; a long prompt sends nothing for a while


@dataclass(slots=True)
class AnswerPart:
    """A piece of an answer: text, and at its end the finish reason and the token counts."""

    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0


class Answerer(Protocol):
    """Answers conversations. `settings` are sampling parameters by their OpenAI and vLLM names."""

    @property
    def name(self) -> str: ...
    def answer(self, messages: list[Message], settings: dict[str, Any], more: bool) -> Iterator[AnswerPart]:
        """Yield the answer in pieces. With `more`, continue the last message, which is the assistant's. QuireError."""
        ...

    def count(self, messages: list[Message]) -> tuple[int, int]:
        """Count the tokens of the conversation, and the most that the model takes."""
        ...


class LocalAnswerer:
    """A model in this process."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    @property
    def name(self) -> str:
        return self._llm.name

    def answer(self, messages: list[Message], settings: dict[str, Any], more: bool) -> Iterator[AnswerPart]:
        params = self._llm.default_params(**settings)
        shown = 0
        for output in self._llm.stream_chat(messages, params, continue_final_message=more):
            sample = output.outputs[0]
            text, shown = sample.text[shown:], len(sample.text)
            prompt = len(output.prompt_token_ids or ())
            yield AnswerPart(text, sample.finish_reason, prompt, len(sample.token_ids))

    def count(self, messages: list[Message]) -> tuple[int, int]:
        return len(self._llm.chat_token_ids(messages)), self._llm.max_model_len


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

    def answer(self, messages: list[Message], settings: dict[str, Any], more: bool) -> Iterator[AnswerPart]:
        body = {"messages": messages, **settings}
        if more:
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        return self._pieces("/v1/chat/completions", body)

    def complete(self, prompt: str, settings: dict[str, Any]) -> Iterator[AnswerPart]:
        """Yield the text that follows `prompt` in pieces. QuireError."""
        return self._pieces("/v1/completions", {"prompt": prompt, **settings})

    def _pieces(self, path: str, body: dict[str, Any]) -> Iterator[AnswerPart]:
        body = {"model": self.name, "stream": True, "stream_options": {"include_usage": True}, **body}
        finish: str | None = None
        for line in self._open(path, body):
            data = line.decode("utf-8", "replace").strip().removeprefix("data:").strip()
            if not data or data.startswith(":") or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise QuireError(str(event["error"].get("message", event["error"])))
            choice = (event.get("choices") or [{}])[0]
            finish = choice.get("finish_reason") or finish
            usage = event.get("usage") or {}
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
            if text or usage:
                yield AnswerPart(text, finish, *tokens)

    def count(self, messages: list[Message]) -> tuple[int, int]:
        body = {"model": self.name, "messages": messages}
        return int(json.load(self._open("/tokenize", body))["count"]), self._longest

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, headers)
        try:
            return urllib.request.urlopen(request, timeout=CONNECT_TIMEOUT)
        except urllib.error.HTTPError as error:
            raise QuireError(_reason(error)) from error
        except OSError as error:
            raise QuireError(f"the server does not answer: {getattr(error, 'reason', error)}") from error


def _reason(error: urllib.error.HTTPError) -> str:
    """Quote the server's own words, or the status."""
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {error.code} {error.reason}"
