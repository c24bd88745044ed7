"""Gives an engine's memory back while it sleeps: the KV cache, and the weights. Knows no request."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from quire.devices.protocol import Executable, KVCache
from quire.errors import EngineError

M = TypeVar("M")
PARTS = ("weights", "kv_cache")


class Holder(Protocol):
    """Computes with an executable and a KV cache that can be taken from it."""

    @property
    def loaded(self) -> bool: ...

    def unload(self) -> None: ...

    def load(self, executable: Executable, cache: KVCache) -> None: ...


def check_parts(parts: Sequence[str]) -> None:
    """Raise EngineError for a name that is not a part."""
    unknown = set(parts) - set(PARTS)
    if unknown:
        raise EngineError(f"wake_up: there is no {sorted(unknown)[0]!r}; tags are {', '.join(PARTS)}")


class MemoryRelease(Generic[M]):
    """Takes memory from a `Holder`, and gives it new memory.

    `load` reads the weights, `make_cache` makes the KV cache, `compile` makes the executable from both. `free_memory`
    is the backend's, which gives back what nothing uses any more.
    """

    def __init__(
        self,
        runner: Holder,
        model: M,
        load: Callable[[], M],
        make_cache: Callable[[], KVCache],
        compile: Callable[[M, KVCache], Executable],
        free_memory: Callable[[], int],
    ) -> None:
        self._runner, self._free_memory = runner, free_memory
        self._model: M | None = model
        self._load, self._make_cache, self._compile = load, make_cache, compile
        self._cache: KVCache | None = None
        self._present = set(PARTS)
        self.keeps_weights = False  # another user of the weights never gives them back
        self.after_load: list[Callable[[], None]] = []  # puts back what a new executable lacks

    @property
    def complete(self) -> bool:
        return len(self._present) == len(PARTS)

    @property
    def model(self) -> M:
        """Return the model that is loaded. EngineError while its weights are given back."""
        if self._model is None:
            raise EngineError("the engine sleeps: wake it up first")
        return self._model

    def release(self, parts: Sequence[str]) -> None:
        """Give back memory; no step may be in flight."""
        self._present -= set(parts)
        if self.complete:
            return
        self._runner.unload()
        self._cache = None
        if "weights" not in self._present and not self.keeps_weights:
            self._model = None
        gc.unfreeze()  # the engine's process froze what lives since its start
        gc.collect()
        self._free_memory()

    def restore(self, parts: Sequence[str]) -> None:
        """Take the parts that are missing. Raises EngineError for a name that is not a part."""
        check_parts(parts)
        if self._take(parts):
            for put_back in self.after_load:
                put_back()

    def _take(self, parts: Sequence[str]) -> bool:
        """Take the parts that are missing; returns whether the executable is a new one."""
        for part in parts:
            if part == "weights" and self._model is None:
                self._model = self._load()
            if part == "kv_cache" and part not in self._present:
                self._cache = self._make_cache()
            self._present.add(part)
        anew = self.complete and not self._runner.loaded
        if anew:
            assert self._model is not None
            cache = self._make_cache() if self._cache is None else self._cache
            self._runner.load(self._compile(self._model, cache), cache)
            self._cache = None
        return anew
