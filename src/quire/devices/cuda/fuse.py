"""Rewrites a graph so that one kernel computes several of its operations, with the bits that they have one by one.

Each pattern reads the list and says what stands in the place of some operations. A kernel that makes several values
stands where the last one was; `Room`, where the first one was, keeps its place in the arena.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec

from quire.devices.cuda.pack import own_matrix
from quire.devices.graph import Graph
from quire.devices.kv import KVSpec
from quire.devices.operands import Norm
from quire.devices.ops import Add, AllReduce, GatedLinear, Linear, Normalize, Op, T, Value, operands, resolved
from quire.devices.peers import Peers

SCALE = 32  # bytes for the scale of a row of codes, and to align them
Named = tuple[Value, Op[Value]]
Edits = dict[int, list[Named]]
"""The operations that replace the one at an index, by the names of their values: indices, or negative numbers."""


class Room(Op[T], frozen=True, eq=False):
    """A value that a later operation makes: one like x, or `codes` of one like x."""

    x: T
    codes: bool = False

    def width(self: Room[int], kv: KVSpec) -> int:
        return self.x + (SCALE if self.codes else 0)


class Round(Op[T], frozen=True, eq=False):
    """Rows of x as int8 codes, and their scales."""

    x: T

    def width(self: Round[int], kv: KVSpec) -> int:
        return self.x + SCALE


class NormalizeSum(Op[T], frozen=True, eq=False):
    """Normalize of a sum: x, normed by `first`, and `other`, each times its factor.

    Each step is left out where it is None. The sum goes to `total` if it is normed, and `codes` are made of the result.
    """

    x: T
    first: Norm | None = None
    other: T | None = None
    factors: tuple[float, float] = (1.0, 1.0)
    total: T | None = None
    norm: Norm | None = None
    codes: T | None = None
    path: str = ""

    def width(self: NormalizeSum[int], kv: KVSpec) -> int:
        return self.x


class NormalizeParts(NormalizeSum[T], frozen=True, eq=False):
    """NormalizeSum of the sum of all ranks' x, which it rounds first, as AllReduce does."""

    peers: Peers | None = None
    ranks: int = 1


class RoundedLinear(Linear[T], frozen=True, eq=False, kw_only=True):
    """Linear by the codes of its x."""

    codes: T


class RoundedGatedLinear(GatedLinear[T], frozen=True, eq=False, kw_only=True):
    """GatedLinear by the codes of its x."""

    codes: T


class Found:
    """A graph as patterns read it: its operations, and the indices of those that read each value, ascending."""

    def __init__(self, graph: Graph, adapters: bool) -> None:
        self.graph, self.ops, self.adapters = graph, graph.ops, adapters
        self.readers: dict[Value, list[int]] = defaultdict(list)
        for index, op in enumerate(graph.ops):
            for value in operands(op):
                self.readers[value].append(index)

    def is_norm(self, index: int) -> bool:
        """Tell whether an operation before the head is the norm of whole rows."""
        op = self.ops[index]
        return index < self.graph.body and isinstance(op, Normalize) and op.groups == 1

    def is_alone(self, index: int, reader: int) -> bool:
        """Tell whether one operation is all that needs such a norm, and no adapter replaces it."""
        value = Value(index)
        needed = value == self.graph.hidden or self.readers[value] != [reader]
        return self.is_norm(index) and not needed and not self.adapters


def norms_of_sums(found: Found) -> Edits:
    """Join a sum with the norm of a term, if nothing else reads that, and with the norm that reads the sum."""
    edits: Edits = {}
    for index, op in enumerate(found.ops[: found.graph.body]):
        if not isinstance(op, Add):
            continue
        x, first, other, factors = op.x, None, op.other, (1.0, op.scale)
        for term, rest, own in ((op.other, op.x, (op.scale, 1.0)), (op.x, op.other, factors)):
            inner = found.ops[term]
            if isinstance(inner, Normalize) and found.is_alone(term, index) and term not in edits:
                x, first, other, factors, edits[term] = inner.x, inner.norm, rest, own, []
                break
        made = NormalizeSum(x, first, other, factors)
        name, after = Value(index), next(iter(found.readers[Value(index)]), index)
        norm = found.ops[after]
        if isinstance(norm, Normalize) and found.is_norm(after):
            edits[index] = [(name, Room(x))]
            joined = msgspec.structs.replace(made, total=name, norm=norm.norm, path=norm.path)
            edits[after] = [(Value(after), joined)]
        elif first is not None:
            edits[index] = [(name, made)]
    return edits


def norms_of_parts(found: Found) -> Edits:
    """Join a sum of all ranks' parts with the norm that reads it, or with a sum if nothing else reads it."""
    edits: Edits = {}
    for index, op in enumerate(found.ops[: found.graph.body]):
        if not isinstance(op, AllReduce) or not (readers := found.readers[Value(index)]):
            continue
        name, after, about = Value(index), readers[0], {"x": op.x, "peers": op.peers, "ranks": op.ranks}
        norm, rooms, last = found.ops[after], readers[:-1], readers[-1]
        if isinstance(norm, Normalize) and found.is_norm(after):
            edits[index] = [(name, Room(op.x))]
            edits[after] = [
                (Value(after), NormalizeParts(**about, total=name, norm=norm.norm, path=norm.path))
            ]
            continue
        total: Any = found.ops[last]
        if not all(isinstance(found.ops[room], Room) for room in rooms):
            continue
        if not isinstance(total, NormalizeSum) or total.other is None:
            continue
        if total.x == name or total.first is None:
            other, factors = total.other, total.factors
            if total.x != name:
                other, factors = total.x, factors[::-1]
            own = {field: getattr(total, field) for field in total.__struct_fields__} | about
            edits[index] = []
            edits[last] = [(Value(last), NormalizeParts(**own | {"other": other, "factors": factors}))]
            edits.update((room, [(Value(room), Room(other))]) for room in rooms)
    return edits


def codes_of_products(found: Found) -> Edits:
    """Round rows once for all products that take codes, in the norm that makes them."""
    edits: Edits = {}
    for x, readers in found.readers.items():
        for head in (False, True):
            users = [i for i in readers if _takes_codes(found.ops[i], x) and (i >= found.graph.body) == head]
            if not users:
                continue
            name, op, made = Value(-1 - users[0]), found.ops[x], None
            if isinstance(op, NormalizeSum):
                made = msgspec.structs.replace(op, codes=name)
            elif isinstance(op, Normalize) and found.is_norm(x):
                made = NormalizeSum(op.x, norm=op.norm, path=op.path, codes=name)
            for user in users:
                edits[user] = [(Value(user), _by_codes(found.ops[user], name))]
            if made is None or head or found.adapters:
                edits[users[0]].insert(0, (name, Round(x)))
            else:
                edits[x] = [(name, Room(made.x, codes=True)), (x, made)]
    return edits


def _takes_codes(op: Op[Value], x: Value) -> bool:
    return isinstance(op, (Linear, GatedLinear)) and op.x == x and own_matrix(op.weight).takes_codes


def _by_codes(op: Op[Value], codes: Value) -> Op[Value]:
    kind = RoundedLinear if isinstance(op, Linear) else RoundedGatedLinear
    return kind(**{name: getattr(op, name) for name in op.__struct_fields__}, codes=codes)


PATTERNS: tuple[Callable[[Found], Edits], ...] = norms_of_sums, norms_of_parts, codes_of_products


def fused(graph: Graph, adapters: bool = False) -> Graph:
    """Apply all patterns. With `adapters`, which may replace norms, each norm has a value of its own."""
    for pattern in PATTERNS:
        graph = _edited(graph, pattern(Found(graph, adapters)))
    return graph


def _edited(graph: Graph, edits: Edits) -> Graph:
    """Return the graph with other operations at some indices, and values numbered anew."""
    numbers: dict[Value, Value] = {}
    made: list[Op[Value]] = []
    body = 0
    for index, op in enumerate(graph.ops):
        for name, own in edits.get(index, [(Value(index), op)]):
            numbers[name] = Value(len(made))
            made.append(resolved(own, numbers.__getitem__))
        body = len(made) if index < graph.body else body
    logits = None if graph.logits is None else numbers[graph.logits]
    return msgspec.structs.replace(
        graph, ops=tuple(made), body=body, hidden=numbers[graph.hidden], logits=logits
    )
