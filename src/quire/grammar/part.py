"""Samples constrained sequences: masks are made while the model computes; forced tokens are not sampled."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby

import numpy as np

from quire.errors import EngineError
from quire.grammar.budget import BudgetMatcher
from quire.grammar.compiler import Grammar, GrammarCompiler
from quire.grammar.masks import MAX_SECONDS, NUM_THREADS, Constraint, MaskWork
from quire.grammar.matcher import Matcher, TokenMask
from quire.runtime.inputs import StepLayout
from quire.runtime.rows import StepRows
from quire.runtime.slots.protocol import Collect
from quire.runtime.slots.sampling import Draws, SamplingPart, draws_of
from quire.types import NewSeq, StepOutput, ThinkingBudget


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
