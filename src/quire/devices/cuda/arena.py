"""Places of a graph's values in one piece of memory: values that never live together share bytes."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from quire.devices import ops
from quire.devices.cuda.fuse import NormalizeParts, Room, Round
from quire.devices.cuda.kernels.sparse import ROOM
from quire.devices.cuda.pack import DTYPES, own_matrix
from quire.devices.graph import Graph, last_reads, widths
from quire.devices.ops import Value, operands
from quire.devices.protocol import KVSpec, Limits, Matrix
from quire.devices.sparse_ops import Choose
from quire.devices.stream_ops import Combine
from quire.errors import ConfigError

ALIGNED = 256  # bytes
CLOSED_STATES = 256 << 20  # bytes for closed states of attention, at most in usual steps
TOKENS, ROWS, PIECE = range(3)
"""TOKENS of the step, all its logit ROWS, or the PIECE of them whose logits are computed: the rows of a value."""


class Place(msgspec.Struct, frozen=True):
    """The bytes of a value [rows, width]: the first one, and what its rows are."""

    begin: int
    width: int
    dtype: Any
    kind: int


class Arena:
    """The places of all values of a graph, and the most bytes that mixtures need beside them.

    Activations have the type `act` of most weights; results of float32 weights, routes and logits are float32.
    """

    def __init__(self, graph: Graph, spec: KVSpec, limits: Limits) -> None:
        self.act = activation_type(graph, spec)
        self.max_tokens = limits.max_tokens
        self.places: list[Place] = []
        self.nbytes = self.beside = 0
        self._free: list[tuple[int, int]] = []  # (begin, bytes), ascending, never side by side
        rows = {TOKENS: limits.max_tokens, ROWS: limits.max_tokens, PIECE: limits.max_logit_rows}
        read = {op.x for op in graph.ops if isinstance(op, (ops.Linear, ops.GatedLinear))}
        kept = {value for op in graph.ops if isinstance(op, ops.Tap) for value in operands(op)}
        kept |= {Value(index) for index, op in enumerate(graph.ops) if isinstance(op, ops.Tap)}
        between = unrounded(graph)
        sizes: list[int] = []
        for index, (op, width, dropped) in enumerate(
            zip(graph.ops, widths(graph, spec), last_reads(graph), strict=True)
        ):
            head = index >= graph.body and Value(index) not in read
            of_rank = isinstance(op, Combine) and isinstance(graph.ops[op.x], Choose)
            single = head or of_rank or isinstance(op, (ops.RopeAngles, ops.Route, Choose)) or is_exact(op)
            single = single or Value(index) in between
            dtype = torch.float32 if single else self.act
            if isinstance(op, Round) or (isinstance(op, Room) and op.codes):
                dtype = torch.int8
            if isinstance(op, ops.RunExperts):
                pairs = limits.max_tokens * (self.places[op.routes].width // 2)
                held = (op.inner_width + width) * self.act.itemsize
                widest, given = max(op.inner_width, self.places[op.x].width), [*map(own_matrix, matrices(op))]
                if any(weight.rounds for weight in given):
                    held += widest + 4
                if any(weight.inputs is not None for weight in given):
                    held += widest * self.act.itemsize
                self.beside = max(self.beside, pairs * held)
            if isinstance(op, Choose):
                self.beside = max(self.beside, ROOM)
            if isinstance(op, (ops.Linear, ops.GatedLinear, ops.HeadLinear)):
                held = 0
                if own_matrix(matrices(op)[0]).inputs is not None:  # as the weight sees them, and their codes
                    held = self.places[op.x].width * (self.act.itemsize + 1) + 4 * len(matrices(op))
                if limits.max_adapters and not isinstance(op, ops.HeadLinear):
                    held += op.weight.shape[0] * 8  # float32 sums, and what adapters add to them
                self.beside = max(self.beside, limits.max_tokens * held)
            kind = PIECE if index >= graph.body else self._kind(op)
            sizes.append(-(-rows[kind] * width * dtype.itemsize // ALIGNED) * ALIGNED)
            begin = self.places[operands(op)[0]].begin if isinstance(op, ops.Tap) else self._take(sizes[-1])
            self.places.append(Place(begin, width, dtype, kind))
            for value in dropped:
                if value not in kept:
                    self._give(self.places[value].begin, sizes[value])

    def _kind(self, op: Any) -> int:
        if isinstance(op, ops.SelectRows):
            return ROWS
        return max((self.places[v].kind for v in operands(op)), default=TOKENS)

    def _take(self, size: int) -> int:
        """Take the first gap that is large enough, or grow."""
        for place, (begin, room) in enumerate(self._free):
            if room >= size:
                self._free[place : place + 1] = [(begin + size, room - size)] if room > size else []
                return begin
        begin = self.nbytes
        if self._free and sum(self._free[-1]) == begin:
            begin = self._free.pop()[0]
        self.nbytes = begin + size
        return begin

    def _give(self, begin: int, size: int) -> None:
        """Give a value's bytes back, joined with the gaps beside them."""
        if not size:
            return
        joined: list[tuple[int, int]] = []
        for one, room in sorted([*self._free, (begin, size)]):
            if joined and sum(joined[-1]) == one:
                joined[-1] = joined[-1][0], joined[-1][1] + room
            else:
                joined.append((one, room))
        self._free = joined


def unrounded(graph: Graph) -> set[Value]:
    """Find values that are not rounded: ids, and parts of sums, with a residual or not, that pass between ranks."""
    parts = {op.x for op in graph.ops if isinstance(op, (ops.AllReduce, NormalizeParts))}
    found = {x for x in parts if isinstance(graph.ops[x], ops.Linear)}
    found |= experts_of_tokens(graph)
    for index, op in enumerate(graph.ops):
        if isinstance(op, ops.AllGather) and op.unrounded:
            found |= {op.x, Value(index)}
    return found


def experts_of_tokens(graph: Graph) -> set[Value]:
    """Find the values that are ids of experts, given by tables."""
    return {op.ids for op in graph.ops if isinstance(op, ops.Route) and op.ids is not None}


def is_exact(op: Any) -> bool:
    """Tell whether a product is made in float32, as a mixture's scores are."""
    return isinstance(op, ops.Linear) and own_matrix(op.weight).dtype == torch.float32


def matrices(op: Any) -> list[Matrix]:
    """Return the weights of products, or a table."""
    if isinstance(op, ops.RunExperts):
        return [weight for expert in op.experts if expert is not None for weight in (expert.up, expert.down)]
    if isinstance(op, (ops.Linear, ops.GatedLinear)):
        return [op.weight]
    if isinstance(op, ops.HeadLinear):
        return list(op.weights)
    return [op.table] if isinstance(op, (ops.Embed, ops.EmbedPositions)) else []


def activation_type(graph: Graph, spec: KVSpec) -> Any:
    """Choose the type of a graph's activations: that of its float weights, but for exact ones and ids, or the cache's.

    ConfigError if weights differ.
    """
    given, ids = enumerate(graph.ops), experts_of_tokens(graph)
    types = [(own_matrix(w).dtype, is_exact(op) or i in ids) for i, op in given for w in matrices(op)]
    found = {dtype for dtype, exact in types if dtype is not None and not exact}
    if len(found) > 1:
        raise ConfigError(
            f"no GPU kernel multiplies weights of several types ({', '.join(sorted(map(str, found)))}): choose --dtype "
            "float32, or --device cpu"
        )
    if found or all(exact for _, exact in types):
        return found.pop() if found else torch.float32
    return next((own for name, own in DTYPES.items() if name == spec.dtype), torch.bfloat16)
