"""Adapters that callers know by name: where each was loaded from, and the digest that its requests carry."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.client.request_checks import check_ids
from quire.errors import RequestError
from quire.params import token_lists
from quire.types import ModelCard, Request


class LoRARequest(msgspec.Struct, frozen=True, kw_only=False):
    """vLLM's name of an adapter in Python: a name, a number of at least 1, and a directory or Hugging Face id.

    With `load_inplace` the files are read again, even if the name was loaded before.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    tensorizer_config_dict: dict[str, Any] | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        if not self.lora_name or not self.lora_path:
            raise RequestError("LoRARequest: lora_name and lora_path must not be empty", "lora_request")
        if self.lora_int_id < 1:
            raise RequestError(
                f"LoRARequest: lora_int_id must be at least 1, got {self.lora_int_id}", "lora_request"
            )

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter by name. `given` is the path or id that it was loaded from, `path` its directory.

    `asked` is the LoRARequest that named it, if one did. `tokens` is the size of its tables of tokens, if it has some.
    """

    name: str
    given: str
    path: str
    digest: str
    number: int
    pinned: bool = False
    asked: Any = None
    tokens: int = 0
    owner: str = ""


def with_adapter(request: Request, adapter: LoadedAdapter | None, model: ModelCard) -> Request:
    """Give the request, and its program's requests, an adapter if one is given.

    RequestError: it names a token that the adapter, or the model without one, does not have.
    """
    if model.spare_tokens:
        own = model.vocab_size - model.spare_tokens
        size = own if adapter is None else max(own, adapter.tokens)
        for name, tokens in (("prompt", request.tokens), *token_lists(request.sampling)):
            check_ids(name, tokens, size, " of the request's model")
    if adapter is None:
        return request
    gens = tuple(with_adapter(gen, adapter, model) for gen in request.gens)
    return msgspec.structs.replace(request, adapter=adapter.digest, adapter_path=adapter.path, gens=gens)


def requests_for(given: Any, count: int) -> list[LoRARequest | None]:
    """Spread vLLM's lora_request over `count` prompts: one for all, or a list with one entry each. RequestError."""
    each = list(given) if isinstance(given, (list, tuple)) else [given] * count
    if not each:
        each = [None] * count
    if len(each) != count:
        raise RequestError(f"{count} prompts need as many adapters, got {len(each)}", "lora_request")
    return [_own(one) for one in each]


def _own(given: Any) -> LoRARequest | None:
    if given is None or isinstance(given, LoRARequest):
        return given
    names = ("lora_name", "lora_int_id", "lora_path")
    if not all(hasattr(given, name) for name in names):
        raise RequestError(f"lora_request must be a LoRARequest, got {type(given).__name__}", "lora_request")
    return LoRARequest(*(getattr(given, name) for name in names))


class LoadedAdapters:
    """The loaded adapters, by name."""

    def __init__(self) -> None:
        self._by_name: dict[str, LoadedAdapter] = {}
        self._numbers = itertools.count(1)

    @property
    def all(self) -> list[LoadedAdapter]:
        """List those of this moment: another thread may load one while a caller reads them."""
        return list(self._by_name.values())

    def find(self, name: str | None) -> LoadedAdapter | None:
        return None if name is None else self._by_name.get(name)

    def numbered(self, number: int) -> LoadedAdapter | None:
        return next((one for one in self.all if one.number == number), None)

    def find_request(self, request: LoRARequest) -> LoadedAdapter | None:
        """Find the adapter that a LoRARequest names, if it is loaded. RequestError: its name or number is in use."""
        for one in self.all:
            same = one.name == request.lora_name, one.number == request.lora_int_id
            if any(same) and not all(same):
                raise RequestError(
                    f"lora_request: adapter {one.name} has the number {one.number}: give each adapter one name and one "
                    "number",
                    "lora_request",
                )
        found = self._by_name.get(request.lora_name)
        if found is None or request.load_inplace or found.given != request.lora_path:
            return None
        return found

    def add(
        self,
        name: str,
        given: str,
        path: str,
        digest: str,
        number: int | None = None,
        pinned: bool = False,
        asked: Any = None,
        tokens: int = 0,
        owner: str = "",
    ) -> LoadedAdapter:
        """Enter an adapter, replacing one of the same name."""
        old = self._by_name.get(name)
        if number is None:
            number = old.number if old is not None else next(self._numbers)
        self._by_name[name] = LoadedAdapter(name, given, path, digest, number, pinned, asked, tokens, owner)
        return self._by_name[name]

    def remove(self, name: str) -> str | None:
        """Forget a name; returns the digest if no other name has it."""
        digest = self._by_name.pop(name).digest
        return None if any(one.digest == digest for one in self._by_name.values()) else digest

    def name_of(self, digest: str) -> str:
        return next((one.name for one in self._by_name.values() if one.digest == digest), digest[:12])
