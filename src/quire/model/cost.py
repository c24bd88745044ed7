"""Counts the cost of a step: bytes that it reads and operations that it needs, for bounds by the machine's limits.

Counts, no measurements. A multiply-add is two operations. Norms, activations and softmax are left out: they are a few
percent, and no limit is measured for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import msgspec
import numpy as np

from quire.devices.protocol import KVSpec, Matrix
from quire.model.parts.decoder import Decoder, DecoderConfig
from quire.model.parts.part import Index
from quire.model.parts.source import Weights
from quire.model.shard import Shard


class Attended(msgspec.Struct, frozen=True):
    """The attention of one layer: `operations` per query and visible position, and how many positions are visible."""

    operations: int
    window: int | None = None
    chunk: int | None = None
    whole: bool = False  # bidirectional: a query also sees the positions after it
    index: Index | None = None
    further: tuple[int, ...] = ()  # positions of a row of each layer kept beside; 0: rows are read once

    def visible(self, position: int, length: int) -> int:
        """Count the positions that the query at `position` of a sequence of `length` tokens sees."""
        first = 0 if self.window is None else max(position - self.window + 1, 0)
        if self.chunk is not None:
            first = max(first, position // self.chunk * self.chunk)
        if self.index is not None and self.index.entries is None:
            return min(position + 1 - first, self.index.most or length)
        if not self.whole:
            return position + 1 - first
        last = length - 1 if self.window is None else min(position + self.window - 1, length - 1)
        return last + 1 - first

    def rows(self, position: int) -> list[int]:
        """Count the rows of each layer kept beside that the query reads."""
        found = [0 if every == 0 else (position + 1) // every for every in self.further]
        if self.index is not None and self.index.entries is not None and self.index.most is not None:
            found[self.index.entries] = min(found[self.index.entries], self.index.most)
        return found

    def computed(self, position: int, length: int) -> int:
        """Count the operations of a query."""
        seen, index = self.visible(position, length), self.index
        if index is None:
            return self.operations * seen
        more = 0 if index.entries is None else self.rows(position)[index.entries]
        return self.operations * (seen + more) + index.operations * ((position + 1) // index.every)


class Cost(msgspec.Struct, frozen=True):
    """The cost of a model's weights, attention and recurrences.

    `dense_*` covers what every token uses: all but the tables, the head and the routed experts. `routed_*` covers all
    routed experts of all layers; a token draws `drawn` of `experts` in each. `head_bytes` is read by a greedy step to
    find the largest logit. A token computes `recurrent_operations` and reads `state_bytes` of recurrent states.
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
    recurrent_operations: int = 0
    state_bytes: int = 0

    def routed_share(self, tokens: int) -> float:
        """Estimate the share of the routed experts that `tokens` tokens choose, if all are equally likely."""
        return float(1.0 - (1.0 - self.drawn / self.experts) ** tokens)

    def step_bytes(self, tokens: int = 1) -> float:
        """Count the bytes of weights that a greedy step of `tokens` sequences reads, one token each."""
        return self.dense_bytes + self.head_bytes + self.routed_bytes * self.routed_share(tokens)

    def kv_bytes(self, context: int, spec: KVSpec) -> float:
        """Count the bytes of keys, values and states that one token reads after `context` others."""
        if not self.layers:
            return float(spec.bytes_per_token * context)
        visible = [layer.visible(context, context + 1) for layer in self.layers]
        visible += [rows for layer in self.layers for rows in layer.rows(context)]
        return float(self.state_bytes + sum(spec.layer_bytes(i) * count for i, count in enumerate(visible)))

    def decode_operations(self, context: int) -> float:
        """Count the operations of one token after `context` others, with its logits."""
        return self._linear(1) + self._attention(context, context + 1)

    def prompt_operations(self, length: int) -> float:
        """Count the operations of a prompt of `length` tokens, with the logits of the last one."""
        return self._linear(length) + self._attention(0, length)

    def _linear(self, tokens: int) -> float:
        """Count the operations of products with weights, and of recurrences, for the tokens of one sequence."""
        return self.token_operations * tokens + 2.0 * self.head_parameters

    @property
    def token_operations(self) -> float:
        """Count the operations of a token but for attention and its logits."""
        active = self.dense_parameters + self.routed_parameters * self.drawn / self.experts
        return 2.0 * active + self.recurrent_operations

    def _attention(self, begin: int, end: int) -> float:
        total = 0
        for layer in set(self.layers):
            computed = sum(layer.computed(position, end) for position in range(begin, end))
            total += self.layers.count(layer) * computed
        return float(total)


# TABLES are paths of what a token reads a row of, and of the head.
TABLES = ("embedding", "positions", "layer_inputs", "head", "table")


def cost_of(decoder: Decoder) -> Cost:
    """Add up the packed weights of a share (or an outline of them)."""
    config, division = decoder.config, decoder.config.division(decoder.shard)
    every = matrices(decoder.weights)
    routed = {path for path in every if ".mixture.experts." in path or ".mixture.silent." in path}
    dense = [
        matrix
        for path, matrix in every.items()
        if path.rpartition(".")[2] not in TABLES and path not in routed
    ]
    experts = [every[path] for path in routed]
    routing = next(iter(config.routings), None)
    head = every.get("head")
    stage = config.stage(decoder.shard)
    states = [state for i in stage for state in config.layers[i].cache(division, 1).states]
    return Cost(
        dense_bytes=sum(matrix.nbytes for matrix in dense),
        dense_parameters=sum(map(_size, dense)),
        head_bytes=0 if head is None else head.greedy_nbytes,
        head_parameters=0 if head is None else _size(head),
        routed_bytes=sum(matrix.nbytes for matrix in experts),
        routed_parameters=sum(map(_size, experts)),
        experts=1 if routing is None else routing.num_experts,
        drawn=1 if routing is None else routing.top_k,
        layers=tuple(attended(config, stage, division)),
        recurrent_operations=2 * sum(state.work for state in states),
        state_bytes=4 * sum(prod(state.shape) for state in states),
    )


def weight_bytes(weights: Weights) -> int:
    """Count the bytes of the packed matrices, a tied head once."""
    tied = weights.get("head") is weights.get("embedding")
    every = matrices(weights)
    return sum(matrix.nbytes for path, matrix in every.items() if path != "head" or not tied)


def matrices(weights: Weights) -> dict[str, Matrix]:
    """Collect the matrices among weights, by path."""
    return {path: weight for path, weight in weights.items() if not isinstance(weight, np.ndarray)}


def _size(matrix: Matrix) -> int:
    return matrix.shape[0] * matrix.shape[1]


def attended(config: DecoderConfig, stage: range, division: Shard) -> Iterator[Attended]:
    """Describe the attention of each layer of a stage."""
    last: Index | None = None
    for layer in stage:
        mixer = config.layers[layer].mixer
        if mixer is None or mixer.scores is None:
            yield Attended(0)
            continue
        seen = mixer.scores.window, mixer.scores.chunk
        index = mixer.index
        if mixer.shares and last is not None:
            index = msgspec.structs.replace(last, operations=0)
        last = index or last
        further = tuple(0 if kept.reach else kept.every for kept in mixer.further(division))
        yield Attended(mixer.operations(division), *seen, config.bidirectional, index, further)
