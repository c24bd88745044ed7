"""Samples constrained sequences: masks are made while the model computes; forced tokens are not sampled."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

import numpy as np

from quire.errors import EngineError
from quire.grammar.compiler import Grammar, GrammarCompiler
from quire.grammar.matcher import GrammarError, Matcher, TokenMask
from quire.grammar.vocabulary import Vocabulary
from quire.runtime.inputs import StepLayout, StepRows
from quire.runtime.slots.protocol import Collect
from quire.runtime.slots.sampling import Draws, SamplingPart, draws_of
from quire.types import NewSeq, StepOutput, ThinkingBudget

_ALL = np.uint32(0xFFFFFFFF)


class ReasoningCount:
    """Follows an output into and out of its reasoning. `forced`: tokens that must come next to end it."""

    __slots__ = ("_begin", "_count", "_end", "_inside", "_keep", "_limit", "_tail", "_vocabulary", "forced")

    def __init__(self, budget: ThinkingBudget, vocabulary: Vocabulary) -> None:
        self._limit = budget.limit
        self._begin = [text.encode() for text in budget.begin]
        self._end = [text.encode() for text in budget.end]
        self._keep = max(map(len, (*self._begin, *self._end)), default=1) - 1
        self._vocabulary = vocabulary
        self._inside = budget.opened
        self._count = 0
        self._tail = b""
        self.forced: deque[int] = deque()
        self._bound()

    def advance(self, token: int) -> None:
        """Add `token`. GrammarError if another one is forced."""
        if self.forced:
            if token != self.forced[0]:
                raise GrammarError(f"token {token} where {self.forced[0]} ends the reasoning")
            self.forced.popleft()
            if not self.forced:
                self._inside, self._tail = False, b""
            return
        text = self._tail + self._vocabulary.pieces[token]
        self._count += self._inside
        if any(mark in text for mark in (self._end if self._inside else self._begin)):
            self._inside, text = not self._inside, b""
        self._tail = text[-self._keep :] if self._keep else b""
        self._bound()

    def copy(self) -> ReasoningCount:
        """Copy the state, to advance on its own."""
        other = copy(self)
        other.forced = deque(self.forced)
        return other

    def _bound(self) -> None:
        """Force the unwritten rest of the end, if no more reasoning is allowed."""
        if self._inside and self._count >= self._limit:
            end = self._end[0]
            written = next((n for n in range(len(end) - 1, 0, -1) if self._tail.endswith(end[:n])), 0)
            self.forced.extend(self._vocabulary.encode(end[written:].decode("utf-8", "replace")))


class BudgetMatcher:
    """A Matcher whose reasoning is bounded; `inner` is the output's own grammar, if it has one."""

    __slots__ = ("_count", "_inner")

    def __init__(self, budget: ThinkingBudget, vocabulary: Vocabulary, inner: Matcher | None) -> None:
        self._count = ReasoningCount(budget, vocabulary)
        self._inner = inner

    @property
    def ended(self) -> bool:
        return self._inner is not None and self._inner.ended

    @property
    def forced(self) -> Sequence[int]:
        if self._inner is None or self._count.forced:
            return self._count.forced
        return self._inner.forced

    def advance(self, token: int) -> None:
        """Add `token`. GrammarError if it is not allowed."""
        self._count.advance(token)
        if self._inner is not None:
            self._inner.advance(token)

    def jump(self, limit: int, stops: frozenset[int]) -> list[int]:
        """As Matcher.jump."""
        taken: list[int] = []
        while len(taken) < limit and (forced := self.forced) and forced[0] not in stops:
            token = forced[0]
            taken.append(token)
            self.advance(token)
        return taken

    def fill(self, mask_W: TokenMask) -> None:
        """As Matcher.fill."""
        if self._count.forced:
            _only(mask_W, self._count.forced[0])
        elif self._inner is not None:
            self._inner.fill(mask_W)
        else:
            mask_W[:] = _ALL

    def count_allowed(self, tokens: list[int]) -> int:
        """As Matcher.count_allowed."""
        most = len(tokens) if self._inner is None else self._inner.count_allowed(tokens)
        count = self._count.copy()
        for place, token in enumerate(tokens[:most]):
            if count.forced and token != count.forced[0]:
                return place
            count.advance(token)
        return most

    def fill_ahead(self, drafts: list[int], masks_RW: TokenMask) -> int:
        """As Matcher.fill_ahead."""
        rows = len(drafts) + 1
        if self._inner is None:
            masks_RW[:rows] = _ALL
        else:
            rows = self._inner.fill_ahead(drafts, masks_RW)
        count = self._count.copy()
        for row in range(rows):
            if count.forced:
                _only(masks_RW[row], count.forced[0])
            if row == len(drafts) or (count.forced and drafts[row] != count.forced[0]):
                return row + 1
            count.advance(drafts[row])
        return rows


def _only(mask_W: TokenMask, token: int) -> None:
    mask_W[:] = 0
    mask_W[token // 32] = np.uint32(1 << token % 32)


NUM_THREADS = 4  # several, so that a slow grammar does not hold up others
PATIENCE = 0.004
"""A step waits PATIENCE seconds for masks once it has logits. Sequences whose mask is late sample in a later step."""
PATIENCE_ALONE = 0.1
MAX_SECONDS = 10.0
"""A grammar that needs more than MAX_SECONDS for one mask ends its request."""


@dataclass(slots=True)
class Advance:
    """The effect of sampled tokens on a grammar: tokens it forces next, and whether it allows no more."""

    forced: list[int] = field(default_factory=list)
    ended: bool = False
    error: str | None = None


@dataclass(slots=True, eq=False)
class Constraint:
    """The grammar of one sequence: its state after `tokens`, the output so far, and masks for what comes next.

    `make` makes a matcher in the state before any output.
    Row 0 of `masks_RW` [R, W] is the mask after `tokens`, row i the mask after the first i tokens of `draft`;
    `num_masks` rows are valid. From `begin` until `is_ready`, matcher and masks belong to a thread. `room` is how many
    tokens may still be added; with `jumps`, forced tokens are appended without sampling.
    """

    make: Callable[[], Matcher | BudgetMatcher]
    tokens: list[int]
    stops: frozenset[int]
    jumps: bool
    room: int
    masks_RW: TokenMask
    draft: list[int] = field(default_factory=list)
    num_masks: int = 0
    matcher: Matcher | BudgetMatcher | None = None
    work: MaskWork | None = None
    is_ready: bool = False
    error: str | None = None

    def begin(self, draft: Sequence[int]) -> None:
        """Begin to make masks, also after each token of `draft`; call it before `prepare`.

        A sequence ends at its first stop token, so later draft tokens do not matter.
        """
        ends = (i for i, token in enumerate(draft) if token in self.stops)
        self.draft = list(draft[: next(ends, len(draft))])
        if len(self.masks_RW) <= len(self.draft):
            self.masks_RW = np.zeros((len(self.draft) + 1, self.masks_RW.shape[1]), np.uint32)

    def prepare(self) -> None:
        """Catch up with `tokens`, then make the masks. The step that reads the masks raises any error."""
        try:
            if self.matcher is None:
                self.matcher = self._replayed()
            self.num_masks = self._fill(self.matcher)
        except GrammarError as error:
            self.error = str(error)
        except Exception as error:
            self.error = f"the grammar failed: {type(error).__name__}: {error}"
        self.is_ready = True

    def _replayed(self) -> Matcher | BudgetMatcher:
        matcher = self.make()
        for token in self.tokens:
            matcher.advance(token)
        return matcher

    def _fill(self, matcher: Matcher | BudgetMatcher) -> int:
        if self.draft:
            try:
                return matcher.fill_ahead(self.draft, self.masks_RW)
            except GrammarError:  # perhaps behind a draft token that will not be sampled: do without the mask
                matcher = self.matcher = self._replayed()
        matcher.fill(self.masks_RW[0])
        return 1

    def num_rows(self, draft: Sequence[int]) -> int:
        """Count the rows of a sequence computed with `draft` that have a mask; later rows cannot be reached."""
        rows = 1
        for mine, given in zip(self.draft[: self.num_masks - 1], draft, strict=False):
            if mine != given:
                break
            rows += 1
        return rows

    def advance(self, sampled: Sequence[int]) -> Advance:
        """Add `sampled` to the output. Moves over forced tokens too if it may jump."""
        matcher = self.matcher
        assert matcher is not None
        self.work, self.is_ready = None, False
        self.room -= len(sampled)
        follow = Advance()
        try:
            for token in sampled:
                if token in self.stops:
                    return follow  # the sequence ends here; if it must not, the token was masked
                self.tokens.append(token)
                matcher.advance(token)
            if self.jumps:
                follow.forced = matcher.jump(self.room, self.stops)
                self.tokens += follow.forced
                self.room -= len(follow.forced)
        except GrammarError as error:
            follow.error = str(error)
        follow.ended = matcher.ended
        return follow


class MaskWork:
    """Sequences that need masks. Threads take them one by one, so that any thread can help."""

    def __init__(self, constraints: list[Constraint], threads: ThreadPoolExecutor) -> None:
        self._queue = deque(constraints)
        self._threads = threads
        self._job = threads.submit(self._run)
        self._waited = False
        self.since = time.monotonic()

    def _run(self) -> None:
        while self._queue:
            try:
                constraint = self._queue.popleft()
            except IndexError:
                return
            constraint.prepare()

    def wait(self) -> None:
        """Wait a moment, the first time; then start a second thread for the sequences behind the slow one."""
        if self._waited:
            return
        self._waited = True
        wait((self._job,), PATIENCE)
        if self._queue and not self._job.done():
            self._threads.submit(self._run)

    def wait_on(self) -> None:
        """Wait longer, because there is nothing else to do."""
        wait((self._job,), PATIENCE_ALONE)


def _matcher(
    compiler: GrammarCompiler, grammar: Grammar | None, honours_ends: bool, thinking: ThinkingBudget | None
) -> Matcher | BudgetMatcher:
    """Make the matcher of a sequence, at its beginning."""
    matcher = None if grammar is None else grammar.matcher(honours_ends)
    if thinking is not None:
        return BudgetMatcher(thinking, compiler.vocabulary, matcher)
    assert matcher is not None
    return matcher


class GrammarPart:
    """Keeps a grammar's state per slot, and samples its sequences through `sampling` with masks.

    Without a `compiler`, requests with a grammar are refused. With `jump_forward`, tokens that a grammar forces are
    appended at once.
    """

    def __init__(
        self,
        sampling: SamplingPart,
        vocab_size: int,
        compiler: GrammarCompiler | None,
        jump_forward: bool = True,
    ) -> None:
        self._sampling = sampling
        self._words = (vocab_size + 31) // 32
        self._compiler = compiler
        self._jump_forward = jump_forward
        self._constraints: dict[int, Constraint] = {}
        self._resumed: set[int] = set()  # slots whose tokens came with the request
        self._draws = Draws()
        self._drafts: Mapping[int, list[int]] = {}
        self._threads = ThreadPoolExecutor(NUM_THREADS, "masks")

    def set(self, new: NewSeq) -> None:
        """Start with the output that the sequence has from before a preemption, if any."""
        request, params = new.request, new.request.sampling
        if not request.constrained:
            return
        if self._compiler is None:
            raise EngineError("this engine was started without support for grammars")
        if request.made:
            self._resumed.add(new.slot)
        honours_ends = bool(request.eos_token_ids)
        grammar = None if request.grammar is None else self._compiler.compile(request.grammar)
        output = new.tokens[len(request.tokens) :]
        # A token whose log-probability is reported must be sampled.
        samples_all = params.wants_logprobs or params.bad_words or params.allowed_token_ids is not None
        self._constraints[new.slot] = Constraint(
            make=partial(_matcher, self._compiler, grammar, honours_ends, request.thinking),
            tokens=output,
            stops=frozenset((*request.eos_token_ids, *(params.stop_token_ids or ()))),
            jumps=self._jump_forward and not samples_all,
            room=request.max_tokens - len(output),
            masks_RW=np.zeros((1, self._words), np.uint32),
        )

    def clear(self, slot: int) -> None:
        """Forget a slot. A thread that still makes its mask finishes by itself."""
        self._constraints.pop(slot, None)
        self._resumed.discard(slot)

    @property
    def active(self) -> bool:
        return bool(self._constraints)

    @property
    def greedy(self) -> bool:
        return not self._constraints

    def rows(self, step: StepLayout) -> list[int]:
        """Start the masks of all constrained sequences that lack one, even if this step does not sample them."""
        self._draws = draws_of(step, self._constraints)
        self._drafts = {seq.slot: seq.draft for seq in step.seqs if seq.draft}
        todo = []
        for slot, constraint in self._constraints.items():
            if constraint.work is None:
                constraint.begin(self._drafts.get(slot, []))
                todo.append(constraint)
        if todo:
            work = MaskWork(todo, self._threads)
            for constraint in todo:
                constraint.work = work
        return self._draws.rows

    def launch(self, rows: StepRows, first: int) -> Collect | None:
        """Sample the rows whose masks are ready."""
        if not self._draws:
            return None
        self._wait()
        places, masks_LW, left = self._ready()
        if not places:
            return left
        draws = self._draws.only(places)
        collect = self._sampling.draw(draws, rows, [first + i for i in places], masks_LW)
        return partial(self._collect, left, collect, list(dict.fromkeys(draws.slots)))

    def _collect(self, left: Collect, collect: Collect, slots: list[int], output: StepOutput) -> None:
        """Add the sampled tokens, and those that the grammars force next."""
        left(output)
        collect(output)
        for slot in slots:
            if slot not in output.errors and slot not in output.moved:
                self._advance(slot, output)

    def count_allowed(self, slot: int, draft: list[int]) -> int:
        """Count how many tokens of `draft` a slot's grammar allows next; all without a grammar.

        Only when the results of this part are collected, before its next `rows`: no thread has the matcher then.
        """
        constraint = self._constraints.get(slot)
        if constraint is None or constraint.work is not None or constraint.matcher is None:
            return len(draft)
        return constraint.matcher.count_allowed(draft)

    def _wait(self) -> None:
        """Wait a moment for masks that are not ready, and longer if nothing else can be sampled."""
        constraints = [self._constraints[slot] for slot in dict.fromkeys(self._draws.slots)]
        works = {id(c.work): c.work for c in constraints if not c.is_ready and c.work is not None}.values()
        for work in works:
            work.wait()
        if self._sampling.is_idle and not any(constraint.is_ready for constraint in constraints):
            for work in works:
                work.wait_on()

    def _ready(self) -> tuple[list[int], TokenMask, Collect]:
        """Find the places of rows with a mask, and the masks [rows, W]. Last: other slots are deferred, or fail."""
        errors: dict[int, str] = {}
        deferred: set[int] = set()
        places: list[int] = []
        masks: list[TokenMask] = []
        slots = self._draws.slots
        for slot, group in groupby(range(len(slots)), key=slots.__getitem__):
            constraint, own = self._constraints[slot], list(group)
            assert constraint.work is not None
            if not constraint.is_ready:
                if time.monotonic() - constraint.work.since > MAX_SECONDS:
                    errors[slot] = f"the grammar needs more than {MAX_SECONDS:g} s for a token"
                else:
                    deferred.add(slot)
            elif constraint.error is not None:
                errors[slot] = constraint.error
            else:
                count = constraint.num_rows(self._drafts.get(slot, []))
                places += own[:count]
                masks.append(constraint.masks_RW[:count])
        masks_LW = np.concatenate(masks) if masks else np.zeros((0, self._words), np.uint32)
        return places, masks_LW, partial(_leave, errors, deferred, self._resumed)

    def _advance(self, slot: int, output: StepOutput) -> None:
        tokens = output.tokens[slot]
        follow = self._constraints[slot].advance(tokens)
        if follow.error is not None:
            output.errors[slot] = follow.error
        if follow.forced:
            tokens += follow.forced
            output.forced[slot] = len(follow.forced)
            self._sampling.sampler.extend(slot, follow.forced)
        if follow.ended:
            output.ended.add(slot)


def _leave(errors: dict[int, str], deferred: set[int], resumed: set[int], output: StepOutput) -> None:
    """Report the slots that were not sampled."""
    output.errors |= errors
    output.refused |= errors.keys() & resumed
    output.deferred |= deferred
