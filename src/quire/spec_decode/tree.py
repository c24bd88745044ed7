"""Trees of drafts (EAGLE-2, Li et al. 2024, arXiv:2406.16858): several guesses for a position.

A tree is a chain, its deepest path, and branches. Each branch goes on from some place in the chain or in an earlier
branch, so all its tokens are at consecutive positions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.devices.protocol import FloatArray, IntArray
from quire.spec_decode.proposer import Branch, Draft

MOST_TREES = 4
"""Sequences of a step that get trees. With more of them, a step's rows cost too much for second guesses."""


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Trees of up to `tokens` tokens in `depth` levels. Each level goes on from `top_k` nodes, with as many children.

    `most` sequences of a step get one.
    """

    top_k: int
    tokens: int
    depth: int
    most: int

    def size(self, depth: int) -> int:
        """The tokens of a tree that may only get `depth` deep."""
        return max(depth, round(self.tokens * depth / self.depth))

    @property
    def rows_per_level(self) -> float:
        return self.tokens / self.depth

    @property
    def rows(self) -> int:
        """The most tokens of all branches of a step."""
        return self.most * self.tokens

    @property
    def branches(self) -> int:
        """The most branches of a step."""
        return self.most * -(-self.tokens // 2)

    @property
    def nodes(self) -> int:
        """The most nodes of two levels of all trees."""
        return 2 * self.most * self.top_k


@dataclass(slots=True)
class TreeBuilder:
    """Grows the tree of one sequence level by level, then keeps its likeliest tokens.

    `target_ids` [V] are the target's ids of the drafter's tokens, -1 for those that it lacks; None: they are the same,
    but for padding from `vocab_size` on. `frontier` are the nodes of the newest level that are worth going on from.
    """

    top_k: int
    vocab_size: int
    target_ids: IntArray | None = None
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # -1: the root, which is the newest known token
    scores: list[float] = field(default_factory=list)  # log-probability of the path
    frontier: list[int] = field(default_factory=list)

    def grow(self, scores_FV: FloatArray) -> list[int]:
        """Add the `top_k` likeliest tokens after each node of the frontier; first after the root.

        `scores_FV` are logits, one row per node. Returns the number of the parent's row for each node of the new
        frontier.
        """
        parents = self.frontier or [-1]
        first = len(self.tokens)
        ids = self.target_ids
        scores_FV = scores_FV[:, : self.vocab_size] if ids is None else np.where(ids >= 0, scores_FV, -np.inf)
        for row, parent in zip(scores_FV.astype(np.float64), parents, strict=True):
            best = _largest(row, self.top_k)
            total = row.max() + np.log(np.exp(row - row.max()).sum())
            base = self.scores[parent] if parent >= 0 else 0.0
            self.scores += (base + row[best] - total).tolist()
            self.parents += [parent] * len(best)
            self.tokens += (best if ids is None else ids[best]).tolist()
        new = np.array(self.scores[first:])
        kept = np.argsort(-new, kind="stable")[: self.top_k]
        self.frontier = [first + int(i) for i in kept]
        rows = {parent: row for row, parent in enumerate(parents)}
        return [rows[self.parents[node]] for node in self.frontier]

    def best(self, size: int) -> list[int]:
        """The `size` likeliest nodes, ascending: a parent is likelier than its children, so its path is among them."""
        order = np.argsort(-np.array(self.scores), kind="stable")[:size]
        return sorted(order.tolist())

    def draft(self, size: int) -> Draft:
        """The tree of the `size` likeliest tokens."""
        nodes = self.best(size)
        return as_draft([self.tokens[node] for node in nodes], _renumbered(self.parents, nodes))


def _largest(row: FloatArray, count: int) -> IntArray:
    """The places of the `count` largest values, largest first; of equal ones the first."""
    if count >= len(row):
        return np.argsort(-row, kind="stable").astype(np.int32)
    least = np.partition(row, len(row) - count)[len(row) - count]
    places = np.flatnonzero(row >= least)
    return places[np.argsort(-row[places], kind="stable")][:count].astype(np.int32)


def _renumbered(parents: Sequence[int], nodes: Sequence[int]) -> list[int]:
    number = {node: place for place, node in enumerate(nodes)}
    return [number[parents[node]] if parents[node] >= 0 else -1 for node in nodes]


def as_draft(tokens: Sequence[int], parents: Sequence[int]) -> Draft:
    """A tree given by each node's token and parent (-1: the root; parents come first) as a chain and branches."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    height = [1] * len(tokens)
    for node in range(len(tokens) - 1, -1, -1):
        if parents[node] >= 0:
            height[parents[node]] = max(height[parents[node]], height[node] + 1)

    def after(node: int) -> list[int]:
        return sorted(children.get(node, ()), key=lambda child: -height[child])

    chains: list[Branch] = []
    starts = deque((node, 0, 0) for node in after(-1))
    while starts:
        node, owner, fork = starts.popleft()
        number, path = len(chains), [tokens[node]]
        while following := after(node):
            starts.extend((other, number, fork + len(path)) for other in following[1:])
            node = following[0]
            path.append(tokens[node])
        chains.append(Branch(owner, fork, path))
    return Draft(chains[0].tokens, branches=chains[1:]) if chains else Draft()
