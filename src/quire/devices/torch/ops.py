"""Operations in plain torch, in float32, on any device: attention; the others are `devices/formulas.py`'s."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

from quire.devices import formulas, sparse_formulas
from quire.devices.ops import AllGather, AllReduce, Attend, Receive
from quire.devices.sparse_formulas import hidden_scores
from quire.devices.torch.attention import attend
from quire.devices.torch.cache import TorchStep
from quire.devices.torch.exchange import arrived, joined, summed


def attend_rows(step: TorchStep, op: Attend[Any]) -> Any:
    """Attend by one softmax over everything that a query sees, not tiled."""
    sinks = None if op.attention.sinks is None else step.own(op.attention.sinks)
    rows, value_dim = [], step.cache.values[op.layer].shape[-1]
    attention = op.attention
    if op.entries is not None:  # they come before the keys, at no position of their own
        attention = msgspec.structs.replace(attention, window=None, chunk=None)
    for b, seq in enumerate(step.sequences):
        own_keys, own_values = step.keys(op.layer, b), step.values(op.layer, b)
        entries = None if op.entries is None else step.keys(op.entries, b)
        for t in range(seq.begin, seq.end):
            position = seq.start + t - seq.begin
            seen = slice(
                op.attention.first_seen(position), min(position + op.attention.ahead + 1, seq.length)
            )
            query = op.q[t].reshape(1, op.num_heads, -1)
            added = None if op.scores is None else op.scores[t].reshape(op.num_heads, 1, -1)[:, :, seen]
            keys, values, first = own_keys[seen], own_values[seen], seen.start
            if op.entries is not None and entries is not None:
                ended = entries[: (position + 1) // step.kv_spec.layer(op.entries).every]
                keys, first = torch.cat([ended, keys]), first - len(ended)
                values = keys[..., :value_dim]
            if op.chosen is not None:
                shown, chosen = range(seen.start, seen.stop), step.host(op.chosen[t])
                by_group = [hidden_scores(op, chosen, g, shown, len(keys)) for g in range(op.groups)]
                hidden = step.own(np.stack(by_group).repeat(op.num_heads // op.groups, 0))[:, None]
                added = hidden if added is None else added + hidden
            out = attend(query, keys, values, first, position, attention, sinks, added)
            rows.append(out.reshape(-1))
    return torch.stack(rows)


def receive(step: TorchStep, op: Receive[Any]) -> Any:
    return arrived(step.inputs, torch.empty(len(step.tokens_T), op.columns, device=step.cache.device))


FORMULAS: formulas.Formulas = {
    **formulas.FORMULAS,
    **sparse_formulas.FORMULAS,
    Attend: attend_rows,
    Receive: receive,
    AllReduce: lambda step, op: step.single(summed(op.x, op.peers)),
    AllGather: lambda step, op: step.single(joined(op.x, op.widths, op.peers)),
}
