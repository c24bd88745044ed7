"""Attention in plain torch."""

from __future__ import annotations

from typing import Any

import torch

from quire.devices.protocol import Attention


def attend(
    query: Any,
    keys: Any,
    values: Any,
    first: int,
    start: int,
    attention: Attention,
    sinks: Any = None,
    added: Any = None,
) -> Any:
    """Queries [Q, N, H] over keys [K, G, H] and values [K, G, Hv], all float32: [Q, N, Hv].

    Keys are at positions `first` onwards and queries at `start` onwards. `sinks` [N] as in `Attention`, on the device;
    `added` [N, Q, K] belongs to scores.
    """
    groups = query.shape[1] // keys.shape[1]
    query = query.transpose(0, 1) * attention.scale
    keys, values = (x.transpose(0, 1).repeat_interleave(groups, 0) for x in (keys, values))
    scores = query @ keys.transpose(1, 2)  # [N, Q, K]
    if attention.cap is not None:
        scores = torch.tanh(scores / attention.cap) * attention.cap
    key_K = torch.arange(first, first + scores.shape[2], device=scores.device)
    query_Q1 = torch.arange(start, start + scores.shape[1], device=scores.device)[:, None]
    if attention.slopes is not None:
        slopes = torch.from_numpy(attention.slopes).to(scores.device)
        scores = scores + slopes[:, None, None] * (key_K - query_Q1)
    if attention.bias is not None:
        reach = attention.bias.shape[1] // 2
        distances = (key_K - query_Q1).clamp(-reach, reach)
        scores = scores + torch.from_numpy(attention.bias).to(scores.device)[:, distances + reach]
    scores = scores if added is None else scores + added
    return (shares(scores, attention.sees(query_Q1, key_K), sinks) @ values).transpose(0, 1)


def shares(scores: Any, shown: Any, sinks: Any) -> Any:
    """Take the softmax of scores [.., N, Q, K] over what is `shown` (None: all) and a sink [N] of each head."""
    scores = scores if shown is None else scores.masked_fill(~shown, -torch.inf)
    if sinks is None:
        return scores.softmax(-1)
    column = sinks[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]
