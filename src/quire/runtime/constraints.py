"""The grammars of running sequences by slot: masks made while the model computes, tokens that need no drawing.

Knows slots and token ids; knows no logits and no scheduler.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np

from quire.grammar.compiler import Grammar, GrammarCompiler
from quire.grammar.matcher import GrammarError, Matcher, TokenMask
from quire.types import NewSeq

NUM_THREADS = 4  # more than one, so that a slow grammar holds up no other
PATIENCE = 0.004
"""Seconds that a step waits for masks when its logits are there; who is later draws in a later step."""
PATIENCE_ALONE = 0.1
MAX_SECONDS = 10.0
"""A grammar that needs longer for one mask ends its request."""


@dataclass(slots=True, eq=False)
class _Slot:
    """One constrained sequence. From `begin` until `ready` its matcher and mask belong to a thread."""

    grammar: Grammar
    honours_ends: bool
    replay: list[int]
    mask_W: TokenMask
    stops: frozenset[int]
    jumps: bool
    room: int
    matcher: Matcher | None = None
    work: _Work | None = None
    ready: bool = False
    error: str | None = None

    def prepare(self) -> None:
        """Catch up with the tokens there are, then make the mask. Errors are kept for the step that asks."""
        try:
            if self.matcher is None:
                self.matcher = self.grammar.matcher(self.honours_ends)
                for token in self.replay:
                    self.matcher.advance(token)
            self.matcher.fill(self.mask_W)
        except GrammarError as error:
            self.error = str(error)
        except Exception as error:
            self.error = f"the grammar failed: {type(error).__name__}: {error}"
        self.ready = True


class _Work:
    """Slots whose masks are to be made; threads take them one by one, so that any of them may help."""

    def __init__(self, slots: list[_Slot], threads: ThreadPoolExecutor) -> None:
        self._queue = deque(slots)
        self._threads = threads
        self._job = threads.submit(self._run)
        self._waited = False
        self.since = time.monotonic()

    def _run(self) -> None:
        while self._queue:
            try:
                slot = self._queue.popleft()
            except IndexError:
                return
            slot.prepare()

    def wait(self) -> None:
        """Wait a moment, the first time; then a second thread goes on behind the slot that takes so long."""
        if self._waited:
            return
        self._waited = True
        wait((self._job,), PATIENCE)
        if self._queue and not self._job.done():
            self._threads.submit(self._run)

    def wait_on(self) -> None:
        wait((self._job,), PATIENCE_ALONE)


@dataclass(slots=True)
class Advance:
    """What follows from a drawn token: tokens that the grammar forces, and whether nothing may be added."""

    forced: list[int] = field(default_factory=list)
    ended: bool = False
    error: str | None = None


class Constraints:
    """Set a slot up, `begin` before the forward pass, take `masks` after it, `advance` with what was drawn."""

    def __init__(self, vocab_size: int, compiler: GrammarCompiler, jump_forward: bool = True) -> None:
        self._words = (vocab_size + 31) // 32
        self._compiler = compiler
        self._jump_forward = jump_forward
        self._slots: dict[int, _Slot] = {}
        self._threads = ThreadPoolExecutor(NUM_THREADS, "masks")

    def set(self, new: NewSeq) -> None:
        """A sequence takes a slot, with the output it may have from before. Its grammar is compiled by now."""
        request, params = new.request, new.request.sampling
        assert request.grammar is not None
        output = new.tokens[len(request.tokens) :]
        # What is drawn among several tokens, scored or refused is not skipped over.
        draws = params.logprobs is not None or params.bad_words or params.allowed_token_ids is not None
        self._slots[new.slot] = _Slot(
            grammar=self._compiler.compile(request.grammar),
            honours_ends=bool(request.eos_token_ids),
            replay=output,
            mask_W=np.zeros(self._words, np.uint32),
            stops=frozenset((*request.eos_token_ids, *(params.stop_token_ids or ()))),
            jumps=self._jump_forward and not draws,
            room=request.max_tokens - len(output),
        )

    def clear(self, slot: int) -> None:
        """Forget a slot; unknown slots are fine. A thread that is at it ends by itself."""
        self._slots.pop(slot, None)

    def begin(self) -> None:
        """Have the masks made that are not, in threads, while the caller computes."""
        todo = [slot for slot in self._slots.values() if slot.work is None]
        if todo:
            work = _Work(todo, self._threads)
            for slot in todo:
                slot.work = work

    def masks(self, slots: Sequence[int], alone: bool) -> tuple[list[int], TokenMask, dict[int, str]]:
        """The masks that are ready: positions in `slots`, their masks [len, W]; and errors by slot.

        Waits a moment for those that are not, and longer where nobody else draws (`alone`).
        """
        entries = [self._slots[slot] for slot in slots]
        works = {id(e.work): e.work for e in entries if not e.ready and e.work is not None}.values()
        for work in works:
            work.wait()
        if alone and not any(entry.ready for entry in entries):
            for work in works:
                work.wait_on()
        ready: list[int] = []
        errors: dict[int, str] = {}
        for i, entry in enumerate(entries):
            assert entry.work is not None
            if not entry.ready:
                if time.monotonic() - entry.work.since > MAX_SECONDS:
                    errors[slots[i]] = f"the grammar needs more than {MAX_SECONDS:g} s for a token"
            elif entry.error is not None:
                errors[slots[i]] = entry.error
            else:
                ready.append(i)
        masks = (
            np.stack([entries[i].mask_W for i in ready]) if ready else np.zeros((0, self._words), np.uint32)
        )
        return ready, masks, errors

    def advance(self, slot: int, token: int) -> Advance:
        """`token` was drawn: the slot's state moves on, over forced tokens too where it may jump."""
        entry = self._slots[slot]
        matcher = entry.matcher
        assert matcher is not None
        entry.work, entry.ready = None, False
        entry.room -= 1
        news = Advance()
        if token in entry.stops:
            return news  # the sequence ends here; where it may not yet, the token was masked
        try:
            matcher.advance(token)
            if entry.jumps:
                news.forced = matcher.jump(entry.room, entry.stops)
                entry.room -= len(news.forced)
        except GrammarError as error:
            news.error = str(error)
        news.ended = matcher.ended
        return news
