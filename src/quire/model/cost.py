"""The cost of a step: bytes that it reads and operations that it needs, for bounds by the machine's limits.

Counts, no measurements. A multiply-add is two operations. Norms, activations and softmax are left out: they are a few
percent, and no limit is measured for them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.devices.protocol import KVSpec, Matrix
from quire.model.shard import WHOLE, Shard
from quire.model.spec import ArchSpec
from quire.model.weights import DecoderWeights


class Attended(msgspec.Struct, frozen=True):
    """The attention of one layer: `operations` per query and visible position, and how many positions are visible."""

    operations: int
    window: int | None = None
    chunk: int | None = None
    whole: bool = False  # bidirectional: a query also sees the positions after it

    def visible(self, position: int, length: int) -> int:
        """Positions that the query at `position` of a sequence of `length` tokens sees."""
        first = 0 if self.window is None else max(position - self.window + 1, 0)
        if self.chunk is not None:
            first = max(first, position // self.chunk * self.chunk)
        if not self.whole:
            return position + 1 - first
        last = length - 1 if self.window is None else min(position + self.window - 1, length - 1)
        return last + 1 - first


class Cost(msgspec.Struct, frozen=True):
    """The cost of a model's weights and attention.

    `dense_*` covers what every token uses: all but the tables, the head and the routed experts. `routed_*` covers all
    routed experts of all layers; a token draws `drawn` of `experts` in each. `head_bytes` is read by a greedy step to
    find the largest logit.
    """

    dense_bytes: int = 0
    dense_parameters: int = 0
    head_bytes: int = 0
    head_parameters: int = 0
    routed_bytes: int = 0
    routed_parameters: int = 0
    experts: int = 1
    drawn: int = 1
    layers: tuple[Attended, ...] = ()

    def routed_share(self, tokens: int) -> float:
        """The share of the routed experts that `tokens` tokens are expected to draw, if all are equally likely."""
        return float(1.0 - (1.0 - self.drawn / self.experts) ** tokens)

    def step_bytes(self, tokens: int = 1) -> float:
        """Bytes of weights that a greedy step of `tokens` sequences reads, one token each."""
        return self.dense_bytes + self.head_bytes + self.routed_bytes * self.routed_share(tokens)

    def kv_bytes(self, context: int, spec: KVSpec) -> float:
        """Bytes of keys and values that one token reads after `context` others."""
        if not self.layers:
            return float(spec.bytes_per_token * context)
        visible = [layer.visible(context, context + 1) for layer in self.layers]
        return float(sum(spec.layer_bytes(i) * count for i, count in enumerate(visible)))

    def decode_operations(self, context: int) -> float:
        """Operations of one token after `context` others, with its logits."""
        return self._linear(1) + self._attention(context, context + 1)

    def prompt_operations(self, length: int) -> float:
        """Operations of a prompt of `length` tokens, with the logits of the last one."""
        return self._linear(length) + self._attention(0, length)

    def _linear(self, tokens: int) -> float:
        """Products with the weights for the tokens of one sequence."""
        active = self.dense_parameters + self.routed_parameters * self.drawn / self.experts
        return 2.0 * (active * tokens + self.head_parameters)

    def _attention(self, begin: int, end: int) -> float:
        total = 0
        for layer in set(self.layers):
            visible = sum(layer.visible(position, end) for position in range(begin, end))
            total += self.layers.count(layer) * layer.operations * visible
        return float(total)


def cost_of(spec: ArchSpec, weights: DecoderWeights, shard: Shard = WHOLE) -> Cost:
    """Add up the packed weights of a share (or an outline of them)."""
    every = matrices(weights)
    for table in (weights.embedding, weights.positions, weights.layer_inputs, weights.head):
        every.pop(id(table), None)
    routed: list[Matrix] = []
    moe = spec.moe
    for layer in weights.layers:
        if layer.moe is not None and moe is not None:
            for expert in layer.moe.experts[: moe.routing.num_experts]:
                if expert is None:
                    continue
                found = [every.pop(id(matrix), None) for matrix in (expert.up, expert.down)]
                routed += [matrix for matrix in found if matrix is not None]
    head = weights.head
    return Cost(
        dense_bytes=sum(matrix.nbytes for matrix in every.values()),
        dense_parameters=sum(_size(matrix) for matrix in every.values()),
        head_bytes=0 if head is None else head.greedy_nbytes,
        head_parameters=0 if head is None else _size(head),
        routed_bytes=sum(matrix.nbytes for matrix in routed),
        routed_parameters=sum(_size(matrix) for matrix in routed),
        experts=1 if moe is None else moe.routing.num_experts,
        drawn=1 if moe is None else moe.routing.top_k,
        layers=tuple(_attended(spec, layer, shard) for layer in shard.layers(spec)),
    )


def matrices(weights: Any) -> dict[int, Matrix]:
    """Every matrix in a tree of weights, by identity."""
    if isinstance(weights, msgspec.Struct):
        weights = tuple(getattr(weights, name) for name in weights.__struct_fields__)
    if isinstance(weights, tuple):
        return {key: value for item in weights for key, value in matrices(item).items()}
    return {id(weights): weights} if hasattr(weights, "dequantize") else {}


def _size(matrix: Matrix) -> int:
    return matrix.shape[0] * matrix.shape[1]


def _attended(spec: ArchSpec, layer: int, shard: Shard) -> Attended:
    latent, shape = spec.latent, spec.shape(layer)
    key = shape.head_dim if latent is None else latent.kv_rank + latent.rope_dim
    value = shape.head_dim if latent is None else latent.kv_rank
    return Attended(
        operations=2 * len(shard.heads(spec, layer)[0]) * (key + value),
        window=spec.windows[layer],
        chunk=None if spec.chunks is None else spec.chunks[layer],
        whole=spec.bidirectional,
    )
