"""The tokenizer of an engine that runs programs: loaded beside the steps, when the first program comes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from quire.errors import QuireError
from quire.program.encoding import Cuts
from quire.text.tokenizer import Tokenizer

T = TypeVar("T")


class Texts:
    """Loads a tokenizer once. Without `load`, programs are refused."""

    def __init__(self, load: Callable[[], Tokenizer] | None, max_model_len: int, caching: bool) -> None:
        self.max_model_len, self.caching = max_model_len, caching
        self._load = load
        self._loaded: Future[Tokenizer] | None = None
        self._cuts: Cuts | None = None
        self._threads: ThreadPoolExecutor | None = None

    def use(self, tokenizer: Tokenizer | None) -> None:
        """Take a tokenizer that the process has loaded already."""
        if tokenizer is not None:
            self._loaded = Future()
            self._loaded.set_result(tokenizer)

    def begin(self) -> bool:
        """Begin to load, unless that was done. False: it is not ready yet."""
        if self._load is None and self._loaded is None:
            return True  # `tokenizer` raises
        if self._loaded is None:
            assert self._load is not None
            self._loaded = self.beside(self._load)
        return self._loaded.done()

    def beside(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` in a thread."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "quire-texts")
        return self._threads.submit(work)

    def wait(self, seconds: float) -> None:
        """Wait at most so long for the tokenizer."""
        if self._loaded is not None:
            wait([self._loaded], seconds)

    @property
    def tokenizer(self) -> Tokenizer:
        """QuireError if there is none or it cannot be loaded."""
        if self._loaded is None:
            raise QuireError("this engine has no tokenizer, which programs need")
        return self._loaded.result()

    @property
    def cuts(self) -> Cuts:
        """Where the tokenizer's tokens end."""
        if self._cuts is None:
            self._cuts = Cuts(self.tokenizer)
        return self._cuts
