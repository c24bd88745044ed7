"""Operations in plain torch, in float32, on any device: attention; the others are `devices/formulas.py`'s."""

from __future__ import annotations

from typing import Any

import torch

from quire.devices import formulas
from quire.devices.ops import Attend
from quire.devices.torch.attention import attend
from quire.devices.torch.cache import TorchStep


def attend_rows(step: TorchStep, op: Attend[Any]) -> Any:
    """One softmax over everything that a query sees, not tiled."""
    keys, values = step.cache.keys[op.layer], step.cache.values[op.layer]
    sinks = None if op.attention.sinks is None else step.own(op.attention.sinks)
    rows = []
    for seq in step.sequences:
        own_keys = keys[seq.places].float() * step.cache.key_scales[op.layer]
        own_values = values[seq.places].float() * step.cache.value_scales[op.layer]
        for t in range(seq.begin, seq.end):
            position = seq.start + t - seq.begin
            seen = slice(
                op.attention.first_seen(position), min(position + op.attention.ahead + 1, seq.length)
            )
            query = op.q[t].reshape(1, op.num_heads, -1)
            added = None if op.scores is None else op.scores[t].reshape(op.num_heads, 1, -1)[:, :, seen]
            around = seen.start, position, op.attention, sinks, added
            out = attend(query, own_keys[seen], own_values[seen], *around)
            rows.append(out.reshape(-1))
    return torch.stack(rows)


FORMULAS: formulas.Formulas = {**formulas.FORMULAS, Attend: attend_rows}
