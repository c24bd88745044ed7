"""Checks a step's input for backends over arrays, and takes in what other stages and ranks send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from quire.devices.peers import Peers
from quire.devices.protocol import FloatArray, IntArray, KVCache, Limits, ModelInput
from quire.errors import EngineError

INT32 = np.dtype(np.int32)


def sequences_of(inputs: ModelInput, tokens: ArrayLike) -> Any:
    """Find the sequence of a token of a step, or of each."""
    return np.searchsorted(inputs.cu_q_B1, tokens, "right") - 1


def check_input(inputs: ModelInput, kv: KVCache, limits: Limits, vocab_size: int) -> None:
    """Raise EngineError if a step breaks a promise of ModelInput or exceeds the limits."""
    tokens_T, cu_q, kv_len_B = inputs.tokens_T, inputs.cu_q_B1, inputs.kv_len_B
    total, batch = len(tokens_T), len(kv_len_B)
    places = inputs.slots_B, inputs.block_table_SM, inputs.logit_rows_L
    optional = inputs.adapters_B, inputs.unseen_U2, inputs.appended_C3
    arrays = tokens_T, inputs.positions_T, cu_q, kv_len_B, *places, *optional
    if any(a is not None and (a.dtype != INT32 or not a.flags.c_contiguous) for a in arrays):
        raise EngineError("every array of a step must be C-contiguous int32")
    if total > limits.max_tokens or batch > limits.max_seqs:
        raise EngineError(f"step of {total} tokens and {batch} sequences is over its limits {limits}")
    if len(cu_q) != batch + 1 or len(inputs.slots_B) != batch or len(inputs.positions_T) != total:
        raise EngineError("the arrays of a step disagree on the number of tokens or sequences")
    counts = cu_q[1:] - cu_q[:-1]
    if cu_q[0] != 0 or cu_q[-1] != total or (counts < 1).any():
        raise EngineError("cu_q must rise from 0 to the number of tokens, by at least one token per sequence")
    wanted = kv_len_B - 1 if total == batch else np.arange(total) + np.repeat(kv_len_B - cu_q[1:], counts)
    if (wrong := inputs.positions_T != wanted).any():
        b = sequences_of(inputs, wrong.argmax())
        raise EngineError(f"positions of sequence {b} must be consecutive and end at kv_len - 1")
    _check_blocks(inputs, kv)
    _check_ids("token id", tokens_T, vocab_size)
    _check_ids("logit row", inputs.logit_rows_L, total)
    if inputs.unseen_U2 is not None:
        _check_ids("unseen token", inputs.unseen_U2[:, 0], total)


def _check_blocks(inputs: ModelInput, kv: KVCache) -> None:
    """Raise EngineError unless tables, or what was appended to them, cover the tokens with blocks of the cache."""
    needed_B, (num_slots, width) = -(-inputs.kv_len_B // kv.block_size), inputs.block_table_SM.shape
    bad_B = needed_B > width
    if inputs.appended_C3 is not None:
        for name, column, bound in zip(
            ("slot", "column", "block"), inputs.appended_C3.T, (num_slots, width, kv.num_blocks), strict=True
        ):
            _check_ids(f"{name} of an appended block", column, bound)
    else:
        table_BM = inputs.block_table_SM[inputs.slots_B, : needed_B.max(initial=0)]
        bad_BM = table_BM.view(np.uint32) >= kv.num_blocks
        bad_B |= (bad_BM & (np.arange(table_BM.shape[1]) < needed_B[:, None])).any(1)
    if bad_B.any():
        b = int(bad_B.argmax())
        raise EngineError(f"the block table of sequence {b} does not cover its {inputs.kv_len_B[b]} tokens")


def _check_ids(name: str, values: IntArray, bound: int) -> None:
    if (values.view(np.uint32) >= bound).any():  # negative ones are large
        raise EngineError(f"a {name} is outside 0..{bound - 1}")


def check_logit_rows(start: int, stop: int, rows: int | None, limits: Limits) -> None:
    """Raise EngineError unless start..stop are of the `rows` of the last run, and within the limits; None: no run."""
    if rows is None or not 0 <= start <= stop <= rows:
        raise EngineError(f"logit rows {start}..{stop} are not of the last run ({rows or 0} rows)")
    if stop - start > limits.max_logit_rows:
        raise EngineError(f"{stop - start} logit rows at once; the limit is {limits.max_logit_rows}")


def check_states(inputs: ModelInput, num_states: int, num_open: int) -> None:
    """Raise EngineError if a step breaks a promise of StateInput; the cache has `num_states` rows."""
    states, counts = inputs.states, np.diff(inputs.cu_q_B1)
    if states is None:
        if num_states:
            raise EngineError("a step of a model with states came without their rows")
        return
    arrays = states.rows_B, states.open_B, states.kept_B
    if any(array.shape != counts.shape for array in arrays) or states.marks_M3.shape[1:] != (3,):
        raise EngineError("the arrays of a step's states disagree on the number of sequences")
    if any(array.dtype != np.int32 or not array.flags.c_contiguous for array in (*arrays, states.marks_M3)):
        raise EngineError("every array of a step must be C-contiguous int32")
    owners, marked, rows = states.marks_M3.T
    every = np.concatenate([states.rows_B, rows])
    if np.any((every < 0) | (every >= num_states)) or len(np.unique(every)) < len(every):
        raise EngineError(f"rows of states must be different ones of the cache's {num_states}")
    first = inputs.positions_T[inputs.cu_q_B1[:-1]]
    if np.any((states.open_B < 0) | (states.open_B > np.minimum(first, num_open))):
        raise EngineError(
            f"a sequence replays more open rows than the {num_open} of the cache, or than it has tokens"
        )
    back = counts - states.kept_B
    if np.any((states.kept_B < 0) | (back < 0) | (back > num_open)):
        raise EngineError(f"a state must take in all tokens of its sequence but at most {num_open}")
    if np.any((owners < 0) | (owners >= len(counts))) or np.any(
        (marked < 0) | (marked > states.kept_B[owners])
    ):
        raise EngineError("a state is marked after tokens that it does not take in")
    if not np.array_equal(np.lexsort(states.marks_M3.T[::-1]), np.arange(len(owners))):
        raise EngineError("marks of states must be in order")


def received(inputs: ModelInput, width: int) -> FloatArray:
    """Return the hidden states [T, width] that come with a step. EngineError if missing or of another shape."""
    hidden_TD, wanted = inputs.hidden_TD, (len(inputs.tokens_T), width)
    if not isinstance(hidden_TD, np.ndarray) or hidden_TD.dtype != np.float32 or hidden_TD.shape != wanted:
        found = "none" if hidden_TD is None else type(hidden_TD).__name__
        if isinstance(hidden_TD, np.ndarray):
            found = f"{hidden_TD.dtype} {list(hidden_TD.shape)}"
        raise EngineError(f"a step of this stage needs hidden states float32 {list(wanted)}, got {found}")
    return hidden_TD


def all_reduced(x: FloatArray, peers: Peers | None) -> FloatArray:
    """Return the sum of all ranks' x, a new array."""
    if peers is None:
        raise EngineError("a graph of several ranks runs without the other ranks")
    total = np.array(x, np.float32).reshape(-1)
    peers.all_reduce(total)
    return total.reshape(x.shape)


def all_gathered(x: FloatArray, widths: Sequence[int], peers: Peers | None) -> FloatArray:
    """Return the columns of all ranks side by side, as a sum in which each rank has zeros for the others."""
    rank = 0 if peers is None else peers.rank
    whole = np.zeros((len(x), sum(widths)), np.float32)
    first = sum(widths[:rank])
    whole[:, first : first + widths[rank]] = x
    return all_reduced(whole, peers)
