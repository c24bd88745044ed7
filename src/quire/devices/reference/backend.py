"""The reference backend: numpy on any machine, slow, the oracle of all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.devices import formulas, sparse_formulas
from quire.devices.adapters import Adapter, check_slots, place_adapter
from quire.devices.choices import CPU
from quire.devices.cpu.machine import free_memory, measure_limits
from quire.devices.graph import Evaluator, Graph, widest_activation
from quire.devices.host import Float64Array, HostLogits
from quire.devices.inputs import check_input, check_logit_rows, check_states, sequences_of
from quire.devices.ops import Attend
from quire.devices.protocol import (
    Activation,
    Arithmetic,
    Array,
    Attention,
    FloatArray,
    KVCache,
    KVSpec,
    Limits,
    MachineLimits,
    Matrix,
    ModelInput,
    WeightType,
)
from quire.devices.reference.cache import ReferenceKVCache
from quire.devices.reference.sampler import ReferenceSampler
from quire.devices.reference.weights import ReferenceMatrix, own_matrix
from quire.devices.sparse_formulas import hidden_scores
from quire.devices.step import StepAdapters
from quire.devices.vectors import activate
from quire.errors import EngineError
from quire.weights.activations import restored_rounding, stored_rounding
from quire.weights.layouts import AnyLayout
from quire.weights.schemes import multiplies_integers
from quire.weights.tensor import Inputs, QuantTensor


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """One step: its input, its KV cache and its adapters, and what was tapped."""

    inputs: ModelInput
    kv: ReferenceKVCache
    adapters: StepAdapters
    tapped: list[FloatArray] = field(default_factory=list)
    xp: Any = np
    at_once: bool = False

    @property
    def kv_spec(self) -> KVSpec:
        return self.kv.spec

    def wide(self, x: Array) -> Float64Array:
        return np.asarray(x, np.float64)

    def single(self, x: Array) -> FloatArray:
        return np.ascontiguousarray(x, np.float32)

    double = wide

    def own(self, values: Array) -> Float64Array:
        return np.array(values, np.float64)

    constant = own

    def host(self, x: Array) -> Array:
        return x

    def row(self, x: Array, i: int) -> Float64Array:
        return np.array(x[i], np.float64)

    def order(self, x: Array) -> Array:
        return np.argsort(x, kind="stable")

    def taken(self, x: Array, places: Array) -> Array:
        return np.take_along_axis(x, np.asarray(places, np.int64), -1)

    def add_rows(self, total: Array, rows: Array, values: Array) -> None:
        np.add.at(total, rows, values)

    def activate(self, kind: Activation, x: Float64Array) -> Float64Array:
        return activate(kind, x)

    def times(self, weight: Matrix, x: FloatArray) -> Float64Array:
        own = own_matrix(weight)
        rows = [own.values @ own.seen(row) for row in x]
        return np.stack(rows) if rows else np.zeros((0, weight.shape[0]))

    def embedded(self, table: Matrix, ids: Sequence[int] | Array) -> Float64Array:
        return np.array(own_matrix(table).values[ids])

    def store(
        self, layer: int, tokens: Sequence[int], keys: Float64Array, values: Float64Array | None
    ) -> None:
        kv, inputs = self.kv, self.inputs
        blocks, rows = kv.places(layer, inputs.positions_T[tokens])
        places = inputs.block_table_SM[inputs.slots_B[sequences_of(inputs, tokens)], blocks], rows
        kv.keys[layer][places] = kv.rounded(keys, kv.key_scales[layer])
        if values is not None:
            kv.values[layer][places] = kv.rounded(values, kv.value_scales[layer])

    def states(self, layer: int, state: int) -> tuple[Array, Array]:
        return self.kv.states[layer][state], self.kv.open[layer][state]

    def keys(self, layer: int, b: int) -> Float64Array:
        return self.gathered(layer, b)[0].transpose(1, 0, 2)

    def gathered(self, layer: int, b: int) -> tuple[Float64Array, Float64Array]:
        """Gather keys and values, or entries, of sequence b in order of position: [G, rows, H]."""
        kv, every = self.kv, self.kv.spec.layer(layer).every
        blocks, rows = kv.places(layer, np.arange(every - 1, int(self.inputs.kv_len_B[b]), every))
        places = self.inputs.block_table_SM[self.inputs.slots_B[b], blocks], rows

        def side(cache: Array, scales: FloatArray) -> Float64Array:
            return np.ascontiguousarray(cache[places].astype(np.float64).transpose(1, 0, 2)) * scales[:, None]

        return side(kv.keys[layer], kv.key_scales[layer]), side(kv.values[layer], kv.value_scales[layer])


def attend(step: ReferenceStep, op: Attend[FloatArray]) -> FloatArray:
    """Attend by one softmax over the whole row, not tiled: the result that the online form must reach."""
    kept = step.kv.spec.layer(op.layer)
    groups, head_dim = kept.num_kv_heads, kept.head_dim
    out = np.empty((len(op.q), op.num_heads, kept.value_dim or head_dim), np.float32)
    for b, kv_len in enumerate(step.inputs.kv_len_B):
        keys_GSH, values_GSH = step.gathered(op.layer, b)
        entries_GEH = None if op.entries is None else step.gathered(op.entries, b)[0]
        start, stop = step.inputs.cu_q_B1[b], step.inputs.cu_q_B1[b + 1]
        for t in range(start, stop):
            end = kv_len - (stop - 1 - t)
            begin, own = op.attention.first_seen(int(end) - 1), int(end) - 1
            end = min(int(end) + op.attention.ahead, int(kv_len))
            q_GRH = op.q[t].astype(np.float64).reshape(groups, op.num_heads // groups, head_dim)
            for g in range(groups):
                heads = slice(g * (op.num_heads // groups), (g + 1) * (op.num_heads // groups))
                keys_SH, values_SH, added = keys_GSH[g, begin:end], values_GSH[g, begin:end], None
                if op.scores is not None:
                    added = op.scores[t].reshape(op.num_heads, -1)[heads, begin:end]
                if op.entries is not None and entries_GEH is not None:
                    ended = (own + 1) // step.kv.spec.layer(op.entries).every
                    keys_SH = np.concatenate([entries_GEH[g, :ended], keys_SH])
                    values_SH = keys_SH[:, : values_SH.shape[1]]
                if op.chosen is not None:
                    hidden = hidden_scores(op, op.chosen[t], g, range(begin, end), len(keys_SH))
                    added = hidden if added is None else added + hidden
                weights = attention_weights(q_GRH[g] @ keys_SH.T, op.attention, heads, own - begin, added)
                out[t, heads] = weights @ values_SH
    return out.reshape(len(op.q), -1)


def attention_weights(
    products_RS: Float64Array,
    attention: Attention,
    heads: slice,
    own: int,
    added_RS: FloatArray | None = None,
) -> Float64Array:
    """q . k of some heads with S positions, their own at index `own` -> the weights of those positions."""
    scores = products_RS * attention.scale
    if attention.cap is not None:
        scores = attention.cap * np.tanh(scores / attention.cap)
    if attention.slopes is not None:
        scores = scores + attention.slopes[heads, None] * (np.arange(scores.shape[1]) - own)
    if attention.bias is not None:
        reach = attention.bias.shape[1] // 2
        distances = np.clip(np.arange(scores.shape[1]) - own, -reach, reach)
        scores = scores + attention.bias[heads][:, distances + reach]
    if added_RS is not None:
        scores = scores + added_RS
    if attention.sinks is not None:
        scores = np.concatenate([scores, attention.sinks[heads, None]], axis=1)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return np.asarray(weights if attention.sinks is None else weights[:, :-1])


FORMULAS: formulas.Formulas = {**formulas.FORMULAS, **sparse_formulas.FORMULAS, Attend: attend}


class ReferenceExecutable:
    """Computes the graph's operations one by one, each step anew. Logits live in one buffer, which it overwrites."""

    def __init__(self, graph: Graph, kv: ReferenceKVCache, limits: Limits) -> None:
        self._graph, self._kv, self._limits = graph, kv, limits
        self._logits = np.full((limits.max_logit_rows, graph.vocab_size), np.nan, np.float32)
        self._hidden = np.empty((0, graph.hidden_size), np.float32)
        self._evaluator = Evaluator(graph, FORMULAS)
        self._step: ReferenceStep | None = None
        self._adapters: dict[int, Adapter] = {}

    def run(self, inputs: ModelInput) -> HostLogits:
        check_input(inputs, self._kv, self._limits, self._graph.token_limit)
        check_slots(self._adapters, inputs)
        check_states(inputs, self._kv.num_states, self._kv.num_open)
        self._step = ReferenceStep(inputs, self._kv, StepAdapters(self._adapters, inputs))
        self._hidden = self._evaluator.hidden(self._step)
        return self.logits(0, min(len(inputs.logit_rows_L), self._limits.max_logit_rows))

    def logits(self, start: int, stop: int) -> HostLogits:
        check_logit_rows(start, stop, None if self._step is None else len(self._hidden), self._limits)
        assert self._step is not None
        self._logits.fill(np.nan)
        view = self._logits[: stop - start]
        if stop > start:
            self._step.adapters.narrow(start, stop)
            view[:] = self._evaluator.logits(self._step, self._hidden[start:stop])
        return HostLogits(view)

    def hidden(self) -> FloatArray:
        return self._hidden

    def adapt(self, slot: int, adapter: Adapter | None) -> int:
        return place_adapter(self._adapters, slot, adapter, self._limits.max_adapters)

    def taps(self) -> tuple[FloatArray, ...]:
        return tuple(self._step.tapped) if self._step is not None else ()


class ReferenceBackend:
    """numpy on any machine."""

    name = "reference (numpy, float64 sums)"
    fingerprint, caveat = "reference", ""
    choices, threads, places_blocks = CPU, 1, False

    def matrix(self, parts: Sequence[Array | QuantTensor], dtype: WeightType) -> ReferenceMatrix:
        return ReferenceMatrix(parts, dtype)

    head = matrix

    def gated_matrix(
        self, gate: Array | QuantTensor, up: Array | QuantTensor, dtype: WeightType
    ) -> ReferenceMatrix:
        return ReferenceMatrix([gate, up], dtype)

    def takes(self, layout: AnyLayout) -> bool:
        return True

    def export(self, matrix: Matrix) -> tuple[dict[str, Any], Array]:
        values = own_matrix(matrix).values.astype(np.float32)
        inputs = own_matrix(matrix).inputs
        given = None if inputs is None else (inputs.order.tolist(), inputs.factors.tolist())
        about = {
            "rows": len(values),
            "layout": "float32",
            "rounding": stored_rounding(own_matrix(matrix).rounding),
            "inputs": given,
        }
        return about, values.reshape(-1).view(np.uint8)

    def restore(self, about: dict[str, Any], data: Array) -> ReferenceMatrix:
        matrix = ReferenceMatrix([data.view(np.float32).reshape(about["rows"], -1)], "float32")
        matrix.rounding = restored_rounding(about["rounding"])
        if about["inputs"] is not None:
            order, factors = about["inputs"]
            matrix.inputs = Inputs(np.array(order, np.int32), np.array(factors, np.float32))
        return matrix

    def kv_cache(
        self, spec: KVSpec, num_blocks: int, block_size: int, num_states: int = 0, num_open: int = 0
    ) -> ReferenceKVCache:
        return ReferenceKVCache(spec, num_blocks, block_size, num_states, num_open)

    def compile(self, graph: Graph, kv: KVCache, limits: Limits) -> ReferenceExecutable:
        if not isinstance(kv, ReferenceKVCache):
            raise EngineError(f"the reference backend got a KV cache of {type(kv).__name__}")
        return ReferenceExecutable(graph, kv, limits)

    def workspace_bytes(self, graph: Graph, kv_spec: KVSpec, limits: Limits) -> int:
        """Count logits and four of the widest activation, which is about what numpy holds at once."""
        logits = 4 * limits.max_logit_rows * graph.vocab_size
        return logits + 4 * 4 * limits.max_tokens * widest_activation(graph, kv_spec)

    def outline(self) -> ReferenceBackend:
        return self

    def sampler(self, vocab_size: int) -> ReferenceSampler:
        return ReferenceSampler(vocab_size)

    def arithmetic(self, weight: WeightType) -> Arithmetic:
        return "int8" if multiplies_integers(weight) else "fp32"

    def free_memory(self) -> int:
        return free_memory()

    def measure_limits(self, arithmetic: Arithmetic) -> MachineLimits:
        return measure_limits(self.threads, arithmetic, "auto")
