"""`Engine`: a model in this process with the calls of SGLang's."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import fields
from typing import Any

import msgspec

from quire import __version__
from quire.client.adapters import LoRARequest
from quire.client.outputs import OutputStream
from quire.config import SECTIONS, EngineConfig
from quire.engine.local import LocalCall
from quire.errors import RequestError
from quire.llm.llm import LLM
from quire.llm.running import push, raise_error
from quire.text.tokenizer import Tokenizer
from quire_compat.sglang.calls import (
    EncodeBody,
    GenerateBody,
    Part,
    first_of,
    ids_of,
    parts_of,
    prompts_of,
    result,
)
from quire_compat.sglang.flags import read_options

log = logging.getLogger("quire")
Result = dict[str, Any]
_ENGINE_OPTIONS = {f.name for section in SECTIONS.values() for f in fields(section)} | {"seed"}


class Engine:
    """Engine of SGLang: a model in this process. Options of a server have no effect.

    Use it in a `with` block, or call `shutdown`, to free its memory early.
    """

    def __init__(self, **options: Any) -> None:
        """Raises ConfigError for an option that is unknown or would change a result."""
        found, notices = read_options(options)
        for notice in notices:
            log.warning("%s", notice)
        engine = {name: value for name, value in found.items() if name in _ENGINE_OPTIONS}
        self._llm = LLM.from_config(EngineConfig.from_options(**engine))
        self._options = {name: value for name, value in options.items() if value is not None}
        self._adapters: dict[str, LoRARequest] = {}
        self._numbers = itertools.count(1)
        for item in found.get("lora_modules", ()):
            name, _, path = item.partition("=")
            self.load_lora_adapter(name, path)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Stop the engine and free its memory."""
        self._llm.shutdown()

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: Result | list[Result] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        stream: bool = False,
        **more: Any,
    ) -> Any:
        """Continue a prompt or many: the body of /generate as arguments, `prompt` being its `text`.

        Returns one result or a list of them; with `stream` an iterator of results that grow, each with all text so far.
        Raises RequestError for arguments that are refused.
        """
        given = {"text": prompt, "sampling_params": sampling_params, "input_ids": input_ids, **more}
        parts, single = parts_of(_read(given, GenerateBody))
        streams = self._streams(parts)
        call = self._llm._submit_streams(streams)
        if stream:
            return self._growing(call, parts, streams, single)
        self._llm._finish(call, streams, use_tqdm=False)
        found = [
            result(part, stream, index)
            for part, stream in zip(parts, streams, strict=True)
            for index in range(part.params.n)
        ]
        return found[0] if single else found

    async def async_generate(self, *args: Any, stream: bool = False, **kwargs: Any) -> Any:
        """Do the same, awaited; with `stream` return an asynchronous iterator."""
        found = await asyncio.to_thread(lambda: self.generate(*args, **{**kwargs, "stream": stream}))
        return _awaited(found) if stream else found

    def _streams(self, parts: list[Part]) -> list[OutputStream]:
        prompts: list[Any] = []
        for part in parts:
            key = "prompt" if isinstance(part.prompt, str) else "prompt_token_ids"
            prompts.append({key: part.prompt, "cache_salt": part.salt})
        adapters = [None if part.adapter is None else self._adapter(part.adapter) for part in parts]
        return list(self._llm._streams(prompts, [part.params for part in parts], None, lora_request=adapters))

    def _growing(
        self, call: LocalCall, parts: list[Part], streams: list[OutputStream], single: bool
    ) -> Iterator[Result]:
        places = {stream.request.id: place for place, stream in enumerate(streams)}
        first = first_of(parts)
        with call:
            for deltas in call:
                changed = dict.fromkeys((places[delta.request_id], delta.index) for delta in deltas)
                for delta in deltas:
                    push(call, streams[places[delta.request_id]], delta)
                for place, index in changed:
                    raise_error(streams[place])
                    found = result(parts[place], streams[place], index)
                    yield found if single else {**found, "index": first[place] + index}

    def _adapter(self, name: str) -> LoRARequest:
        if name not in self._adapters:
            known = ", ".join(self._adapters) or "none"
            raise RequestError(f"lora_path {name!r} is not loaded; there is {known}", "lora_path")
        return self._adapters[name]

    def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool = False) -> bool:
        """Load an adapter under a name. ModelError: it cannot be loaded."""
        request = LoRARequest(lora_name, next(self._numbers), lora_path)
        self._llm.add_lora(request)
        self._adapters[lora_name] = request
        if pinned:
            self._llm.pin_lora(request.lora_int_id)
        return True

    def unload_lora_adapter(self, lora_name: str) -> bool:
        """Forget an adapter. RequestError: there is none of that name."""
        found = self._adapter(lora_name)
        del self._adapters[lora_name]
        return self._llm.remove_lora(found.lora_int_id)

    def encode(self, prompt: str | list[str] | list[int] | list[list[int]], **more: Any) -> Any:
        """Return the embedding of a text or of many: SGLang's body of /encode as arguments."""
        ids = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], str)
        body = _read({"input_ids" if ids else "text": prompt, **more}, EncodeBody)
        prompts, single = prompts_of(body.text, body.input_ids)
        outputs = self._llm.embed(prompts, use_tqdm=False)
        rids = [body.rid] if single else ids_of(body.rid, len(prompts))
        found = [
            {
                "embedding": output.outputs.embedding,
                "meta_info": {
                    "id": rid or output.request_id,
                    "prompt_tokens": len(output.prompt_token_ids),
                    "finish_reason": {"type": "length", "length": 0},
                },
            }
            for rid, output in zip(rids, outputs, strict=True)
        ]
        return found[0] if single else found

    async def async_encode(self, *args: Any, **kwargs: Any) -> Any:
        """Do the same, awaited."""
        return await asyncio.to_thread(self.encode, *args, **kwargs)

    def get_tokenizer(self) -> Tokenizer | None:
        return self._llm.get_tokenizer()

    def flush_cache(self) -> bool:
        """Forget all cached prefixes."""
        return self._llm.reset_prefix_cache()

    def get_server_info(self) -> Result:
        """Return the options that were given, and the engine's state."""
        state = self._llm.stats().as_dict()
        return {**self._options, "version": __version__, "internal_states": [state]}

    def release_memory_occupation(self, tags: list[str] | None = None) -> None:
        """Give the memory of weights and cache back, or of the cache alone if `tags` say so."""
        self._llm.sleep(1 if tags == ["kv_cache"] else 2)

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        """Take the memory again."""
        self._llm.wake_up(tags)

    def start_profile(self, **ignored: Any) -> None:
        """Trace steps until `stop_profile`."""
        self._llm.start_profile()

    def stop_profile(self) -> str | None:
        """Write the trace and return its path."""
        return self._llm.stop_profile()


def _read(given: Result, body: type[Any]) -> Any:
    """Arguments as the body of an endpoint, None being unset. RequestError for one that is unknown or wrong."""
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name not in body.__struct_fields__:
            raise RequestError(f"{name} is not supported: take {', '.join(body.__struct_fields__)}", name)
    try:
        return msgspec.convert(given, body)
    except msgspec.ValidationError as error:
        raise RequestError(str(error)) from error


async def _awaited(results: Iterator[Result]) -> AsyncIterator[Result]:
    """Yield the results of an iterator, each awaited on a thread."""
    while (found := await asyncio.to_thread(next, results, None)) is not None:
        yield found
