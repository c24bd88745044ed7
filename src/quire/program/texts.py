"""The tokenizer of an engine that runs programs: loaded beside the steps, when the first program comes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from quire.errors import QuireError
from quire.program.encoding import Cuts
from quire.text.tokenizer import Tokenizer
from quire.types import Request

T = TypeVar("T")


class Texts:
    """Loads a tokenizer once, and is the gate that holds programs meanwhile. Without `load`, programs are refused."""

    def __init__(self, load: Callable[[], Tokenizer] | None, max_model_len: int, caching: bool) -> None:
        self.max_model_len, self.caching = max_model_len, caching
        self._load = load
        self._loaded: Future[Tokenizer] | None = None
        self._cuts: Cuts | None = None
        self._threads: ThreadPoolExecutor | None = None

    def hold(self, request: Request) -> Future[Tokenizer] | None:
        """Hold a program until the tokenizer is loaded, which begins with the first program."""
        if request.program is None or self._load is None:
            return None  # without `load`, `tokenizer` raises
        if self._loaded is None:
            self._loaded = self.beside(self._load)
        return None if self._loaded.done() else self._loaded

    def remove(self, request_id: str) -> None:
        """Forget nothing: all programs wait for the same."""

    def beside(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` in a thread."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "quire-texts")
        return self._threads.submit(work)

    @property
    def tokenizer(self) -> Tokenizer:
        """QuireError if there is none or it cannot be loaded."""
        if self._loaded is None:
            raise QuireError("this engine has no tokenizer, which programs need")
        return self._loaded.result()

    @property
    def cuts(self) -> Cuts:
        """Find where the tokenizer's tokens end, once."""
        if self._cuts is None:
            self._cuts = Cuts(self.tokenizer)
        return self._cuts
