"""`Runtime`: a server with SGLang's options in a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import closing
from typing import Any

from quire.config import ModelConfig
from quire.engine.directory import model_directory
from quire.errors import EngineError
from quire.program import language
from quire.program.language.runtime import arguments
from quire.text.tokenizer import Tokenizer

MODULE = "quire_compat.sglang.launch_server"


class Runtime(language.Runtime):
    """Runtime of programs with SGLang's options and its /generate."""

    def __init__(self, model_path: str = "", *, log_level: str = "error", **options: Any) -> None:
        self._tokenizer = str(options.get("tokenizer_path") or model_path)
        super().__init__(model_path, log_level=log_level, **options)

    def _command(self, model_path: str, options: Mapping[str, Any]) -> list[str]:
        words = ["--model-path", model_path]
        for name, value in options.items():
            if value is not False:  # its switches have no other side
                words += arguments(name, _as_words(value))
        return [sys.executable, "-m", MODULE, *words]

    @property
    def generate_url(self) -> str:
        return f"{self.url}/generate"

    @property
    def endpoint(self) -> Runtime:
        """Return the backend of programs: this object."""
        return self

    def generate(self, prompt: str | list[str], sampling_params: Any = None, **more: Any) -> str:
        """Ask /generate and return its answer as JSON text; `more` are fields of its body."""
        return json.dumps(self._posted("/generate", text=prompt, sampling_params=sampling_params, **more))

    async def async_generate(self, prompt: str, sampling_params: Any = None) -> AsyncIterator[str]:
        """Yield the output in the pieces in which it comes."""
        body = {"text": prompt, "sampling_params": sampling_params, "stream": True}
        texts = self._streamed("/generate", body)
        while (piece := await asyncio.to_thread(next, texts, None)) is not None:
            yield piece

    def get_tokenizer(self) -> Tokenizer:
        """Load the tokenizer of the server's model."""
        return Tokenizer.load(model_directory(ModelConfig(model=self._tokenizer)))

    def _posted(self, path: str, **body: Any) -> Any:
        connection, answer = self._ask("POST", path, json.dumps(body).encode())
        with closing(connection):
            return json.loads(answer.read())

    def _streamed(self, path: str, body: Mapping[str, Any]) -> Iterator[str]:
        connection, answer = self._ask("POST", path, json.dumps(body).encode())
        shown = 0
        with closing(connection):
            for line in answer:
                data = line.removeprefix(b"data:").strip()
                if not data or data == b"[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise EngineError(str(event["error"]["message"]))
                yield event["text"][shown:]
                shown = len(event["text"])


def _as_words(value: Any) -> Any:
    """Write a map from names to paths as NAME=PATH; leave other values."""
    return [f"{name}={path}" for name, path in value.items()] if isinstance(value, Mapping) else value
