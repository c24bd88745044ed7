"""Compiles grammars within bounds and keeps the latest. Knows no requests and no scheduler.

llguidance stops if a grammar is too large or needs too much work for one token (`_limits`). `try_out` finds grammars
that are slow beyond that, in a process that can be killed.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from quire.errors import RequestError
from quire.grammar.constraint import grammar_text
from quire.grammar.matcher import GrammarError, Matcher, first_line
from quire.grammar.schema import EFFORTS
from quire.grammar.vocabulary import Vocabulary
from quire.lazy import Lazy
from quire.params import StructuredOutputsParams
from quire.shares import Turns

if TYPE_CHECKING:
    import llguidance
else:
    llguidance = Lazy("llguidance")

TRIED_TOKENS = 24
MAX_CACHED = 64
MAX_CACHED_CHARACTERS = 16 << 20


# A state of the lexer takes 1 to 2 kB, so a grammar takes up to 100 MB; 14 units of fuel are a microsecond.
def _limits() -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


_UNSUPPORTED = ("not supported", "Unimplemented", "Unknown format", "only supported", "unsupported")


def _explain(message: str) -> RequestError:
    """Turn a compiler error into a request error: malformed, or not supported."""
    line = first_line(message)
    what = "uses what is not supported" if any(word in line for word in _UNSUPPORTED) else "is not valid"
    return RequestError(f"the constraint {what}: {line}", "structured_outputs")


class Grammar:
    """A compiled grammar; its matchers share their caches."""

    __slots__ = ("_prototype", "_vocabulary")

    def __init__(self, prototype: llguidance.LLMatcher, vocabulary: Vocabulary) -> None:
        self._prototype = prototype
        self._vocabulary = vocabulary

    def matcher(self, honour_ends: bool = True) -> Matcher:
        """Make a matcher at the beginning. Without `honour_ends`, end-of-sequence tokens are never allowed."""
        return Matcher(self._prototype.deep_copy(), () if honour_ends else self._vocabulary.ends)


class GrammarCompiler:
    """Compiles grammars, for any thread. The vocabulary is built on first use, so that it does not delay the start."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary]) -> None:
        self._make_vocabulary = make_vocabulary
        self._vocabulary: Vocabulary | None = None
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, Grammar] = OrderedDict()
        self._threads: ThreadPoolExecutor | None = None
        self._waiting: Turns[tuple[str, Future[Grammar]]] = Turns()

    @property
    def vocabulary(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            return self._vocabulary

    def prepare(self) -> None:
        """Build the vocabulary now."""
        _ = self.vocabulary

    def text(self, params: StructuredOutputsParams, effort: int = 0) -> str:
        """Write a constraint in llguidance's notation. RequestError if it is malformed."""
        return grammar_text(params, self.vocabulary.special, effort)

    def find(self, text: str) -> Grammar | None:
        """Return the grammar if it is compiled already."""
        with self._lock:
            grammar = self._cache.get(text)
            if grammar is not None:
                self._cache.move_to_end(text)
            return grammar

    def compile(self, text: str) -> Grammar:
        """Compile `text`, or find it among the latest. RequestError if malformed, not supported or too large."""
        grammar = self.find(text)
        if grammar is not None:
            return grammar
        vocabulary = self.vocabulary
        prototype = llguidance.LLMatcher(vocabulary.table, text, log_level=0, limits=_limits())
        if prototype.is_error():
            raise _explain(prototype.get_error())
        grammar = Grammar(prototype, vocabulary)
        with self._lock:
            self._cache[text] = grammar
            while len(self._cache) > 1 and (
                len(self._cache) > MAX_CACHED or sum(map(len, self._cache)) > MAX_CACHED_CHARACTERS
            ):
                self._cache.popitem(last=False)
        return grammar

    def submit(self, text: str, owner: str = "") -> Future[Grammar]:
        """Compile in a low-priority thread, for callers that must not wait. Owners take turns."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "grammar", initializer=_step_back)
        job: Future[Grammar] = Future()
        with self._lock:
            self._waiting.put(owner, (text, job))
        self._threads.submit(self._compile_next)
        return job

    def _compile_next(self) -> None:
        with self._lock:
            text, job = self._waiting.next()
        try:
            job.set_result(self.compile(text))
        except Exception as error:
            job.set_exception(error)

    def check(self, params: StructuredOutputsParams) -> str:
        """Find the text of a constraint that compiles and can be followed. RequestError gives the reason if none does.

        If a schema does not compile as written, rewritten forms are tried (`schema.EFFORTS`).
        """
        refusal: RequestError | None = None
        tried: set[str] = set()
        for effort in EFFORTS:
            text = self.text(params, effort)
            if text in tried:
                continue
            tried.add(text)
            try:
                try_out(self.compile(text), len(self.vocabulary.pieces))
            except RequestError as error:
                refusal = refusal or error
            else:
                return text
        assert refusal is not None
        raise refusal


def try_out(grammar: Grammar, vocab_size: int) -> None:
    """Follow the grammar for a few tokens, to refuse one that is too complex before it runs.

    RequestError with the reason.
    """
    mask_W = np.zeros((vocab_size + 31) // 32, np.uint32)
    for turn in (1, 2):
        matcher = grammar.matcher(honour_ends=False)
        for _ in range(TRIED_TOKENS):
            if matcher.ended:
                break
            try:
                matcher.fill(mask_W)
                allowed = np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little")[:vocab_size])
                if not len(allowed):
                    break
                matcher.advance(int(allowed[turn * (len(allowed) - 1) // 2]))
            except GrammarError as error:
                raise RequestError(
                    f"the constraint cannot be followed: {error}", "structured_outputs"
                ) from error


def _step_back() -> None:
    """Let threads that make tokens go first (on Linux, niceness belongs to a thread)."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
