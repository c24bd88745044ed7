"""Suffix decoding (Oliaro et al. 2024, arXiv:2411.04975): drafts are the most frequent continuations of recent text.

One tree counts the token strings of the sequence itself, another of recent outputs with the same cache salt.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

from quire import _native
from quire.config import SpeculativeOptions
from quire.spec_decode.proposer import Computed, Draft, Proposer, SpecSequence, StepView

SHARED_BYTES = 256 << 20
"""SHARED_BYTES hold all shared trees together; the oldest outputs are forgotten first."""
MOST_GROWN = 8192
"""MOST_GROWN tokens enter the sequences' own trees in a step: long prompts take several."""


class SharedOutputs:
    """Trees of recent outputs, one per salt, within a number of outputs and of bytes."""

    def __init__(self, max_depth: int, max_outputs: int, max_bytes: int = SHARED_BYTES) -> None:
        self._max_depth, self._max_outputs, self._max_bytes = max_depth, max_outputs, max_bytes
        self._trees: dict[str, _native.SuffixTree] = {}
        self._ended: deque[tuple[str, int]] = deque()  # outputs that grow no more, oldest first
        self.ids = itertools.count()

    def tree(self, salt: str) -> _native.SuffixTree:
        if salt not in self._trees:
            self._trees[salt] = _native.SuffixTree(self._max_depth)
        return self._trees[salt]

    def close(self, salt: str, number: int) -> None:
        """Keep an output that has ended, and forget the oldest beyond the limits."""
        self.tree(salt).close(number)
        self._ended.append((salt, number))
        while self._ended and (len(self._ended) > self._max_outputs or self.nbytes > self._max_bytes):
            old_salt, old = self._ended.popleft()
            self._trees[old_salt].remove(old)
            if not self._trees[old_salt].num_sequences:
                del self._trees[old_salt]

    @property
    def nbytes(self) -> int:
        return sum(tree.nbytes for tree in self._trees.values())


class SuffixProposer(Proposer):
    """Drafts as long as their probability, counted in the trees, stays above a limit."""

    def __init__(self, options: SpeculativeOptions) -> None:
        self._depth = options.suffix_decoding_max_tree_depth
        self._factor = options.suffix_decoding_max_spec_factor
        self._offset = options.suffix_decoding_max_spec_offset
        self._least = options.suffix_decoding_min_token_prob
        outputs = options.suffix_decoding_max_cached_requests
        self._shared = SharedOutputs(self._depth, outputs) if outputs else None
        self._learns = True  # from outputs that nobody drafted for
        self._own: dict[int, tuple[_native.SuffixTree, int, int]] = {}  # by slot: tree, its length, shared id

    def start(self, seq: SpecSequence) -> None:
        number = -1 if self._shared is None else next(self._shared.ids)
        self._own[seq.slot] = _native.SuffixTree(self._depth), 0, number

    def stop(self, seq: SpecSequence) -> None:
        _, length, number = self._own.pop(seq.slot)
        end = len(seq.tokens) if self._learns else length
        self._learn(seq, length, end, number)
        if self._shared is not None and end > seq.num_prompt:
            self._shared.close(seq.request.salt, number)

    def observe(self, computed: Sequence[Computed], step: StepView) -> None:
        self._learns = step.drafting_pays

    def _learn(self, seq: SpecSequence, start: int, stop: int, number: int) -> None:
        """Add the output in positions start..stop-1 to the shared tree."""
        start = max(start, seq.num_prompt)
        if self._shared is not None and stop > start:
            self._shared.tree(seq.request.salt).extend(number, seq.tokens[start:stop].tolist())

    def _grow(self, seq: SpecSequence, most: int) -> int:
        """Take in at most `most` new tokens; returns how many."""
        tree, length, number = self._own[seq.slot]
        new = seq.tokens[length : length + most]
        if not new or len(seq.tokens) <= seq.num_prompt:
            return 0
        tree.extend(0, new.tolist())
        self._learn(seq, length, length + len(new), number)
        self._own[seq.slot] = tree, length + len(new), number
        return len(new)

    def propose(self, asks: Sequence[tuple[SpecSequence, int]], step: StepView) -> list[Draft]:
        room = MOST_GROWN
        for seq, _ in asks:
            room -= self._grow(seq, room)
        return [self._one(seq, count) for seq, count in asks]

    def _one(self, seq: SpecSequence, count: int) -> Draft:
        context = seq.tokens[-self._depth :]
        best: tuple[list[int], list[float], float, int] = ([], [], 0.0, 0)
        for tree in self._trees(seq):
            found = tree.draft(context, count, self._factor, self._offset, self._least)
            if found[2] > best[2]:
                best = found
        return Draft(best[0], best[1])

    def _trees(self, seq: SpecSequence) -> list[_native.SuffixTree]:
        own = self._own[seq.slot][0]
        return [own] if self._shared is None else [own, self._shared.tree(seq.request.salt)]
