"""The oracle's KV cache, and an executable that calls a graph's functions anew each step."""

from __future__ import annotations

import numpy as np
from msgspec.structs import astuple

from quire.devices.host import HostLogits
from quire.devices.protocol import (
    FloatArray,
    Graph,
    KVCache,
    Limits,
    ModelInput,
)
from quire.devices.reference.cache import ReferenceKVCache
from quire.devices.reference.ops import ReferenceOps
from quire.errors import EngineError


def check_input(inputs: ModelInput, kv: KVCache, limits: Limits, vocab_size: int) -> None:
    """Raise EngineError where a step breaks a promise of ModelInput or exceeds the limits."""
    total, batch = len(inputs.tokens_T), len(inputs.kv_len_B)
    arrays = [a for a in astuple(inputs) if isinstance(a, np.ndarray) and a is not inputs.hidden_TD]
    if any(a.dtype != np.int32 or not a.flags.c_contiguous for a in arrays):
        raise EngineError("every array of a step must be C-contiguous int32")
    if total > limits.max_tokens or batch > limits.max_seqs:
        raise EngineError(f"step of {total} tokens and {batch} sequences is over its limits {limits}")
    if len(inputs.cu_q_B1) != batch + 1 or len(inputs.slots_B) != batch or len(inputs.positions_T) != total:
        raise EngineError("the arrays of a step disagree on the number of tokens or sequences")
    if inputs.cu_q_B1[0] != 0 or inputs.cu_q_B1[-1] != total or np.any(np.diff(inputs.cu_q_B1) < 1):
        raise EngineError("cu_q must rise from 0 to the number of tokens, by at least one token a sequence")
    for b in range(batch):
        start, stop, length = inputs.cu_q_B1[b], inputs.cu_q_B1[b + 1], inputs.kv_len_B[b]
        if not np.array_equal(inputs.positions_T[start:stop], np.arange(length - (stop - start), length)):
            raise EngineError(f"positions of sequence {b} must be consecutive and end at kv_len - 1")
        used = inputs.block_table_SM[inputs.slots_B[b], : -(-length // kv.block_size)]
        if length > inputs.block_table_SM.shape[1] * kv.block_size or np.any(
            (used < 0) | (used >= kv.num_blocks)
        ):
            raise EngineError(f"the block table of sequence {b} does not cover its {length} tokens")
    for name, values, bound in (
        ("token id", inputs.tokens_T, vocab_size),
        ("logit row", inputs.logit_rows_L, total),
    ):
        if np.any((values < 0) | (values >= bound)):
            raise EngineError(f"a {name} is outside 0..{bound - 1}")


class ReferenceExecutable:
    """Runs the graph's functions anew each step. Logits live in one buffer, overwritten as promised."""

    def __init__(self, graph: Graph, kv: ReferenceKVCache, limits: Limits) -> None:
        self._graph, self._kv, self._limits = graph, kv, limits
        self._logits = np.full((limits.max_logit_rows, graph.vocab_size), np.nan, np.float32)
        self._hidden = np.empty((0, graph.hidden_size), np.float32)
        self._ops: ReferenceOps | None = None

    def run(self, inputs: ModelInput) -> HostLogits:
        check_input(inputs, self._kv, self._limits, self._graph.vocab_size)
        self._ops = ReferenceOps(inputs, self._kv)
        self._hidden = self._graph.hidden(self._ops)
        return self.logits(0, min(len(inputs.logit_rows_L), self._limits.max_logit_rows))

    def logits(self, start: int, stop: int) -> HostLogits:
        if self._ops is None or not 0 <= start <= stop <= len(self._hidden):
            raise EngineError(
                f"logit rows {start}..{stop} are not of the last run ({len(self._hidden)} rows)"
            )
        if stop - start > self._limits.max_logit_rows:
            raise EngineError(
                f"{stop - start} logit rows at once; the limit is {self._limits.max_logit_rows}"
            )
        self._logits.fill(np.nan)
        view = self._logits[: stop - start]
        if stop > start:
            if self._graph.head is None:
                raise EngineError("this stage has no head: a step cannot ask it for logits")
            view[:] = self._graph.head(self._ops, self._hidden[start:stop])
        return HostLogits(view)

    def hidden(self) -> FloatArray:
        return self._hidden

    def taps(self) -> tuple[FloatArray, ...]:
        return tuple(self._ops.tapped) if self._ops is not None else ()
