"""Paged attention problems of random numbers, as a device holds them, and their answers by a formula in float64."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from quire.devices.cuda.kernels.attention import Changes, LayerCache, StepTensors, WorkTensors, attend
from quire.devices.cuda.launch import Launcher
from quire.devices.cuda.tiles import AttentionTile, Shape
from quire.devices.cuda.work import WorkShape, work_list

WHOLE = AttentionTile(128, 64, Shape())
ROUNDED = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}


@dataclass(frozen=True)
class Problem:
    """Queries of a ragged step: `counts` new tokens of sequences that are then `lengths` long."""

    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    heads: int = 4
    groups: int = 2
    width: int = 32
    rotary: int = 0  # latent attention: values are the first `width` elements of a key
    block: int = 16
    act: Any = torch.bfloat16
    kept: Any = torch.bfloat16
    window: int = 0
    chunk: int = 0
    ahead: int = 0
    cap: float = 0.0
    changes: tuple[str, ...] = ()
    top: int = 0  # pools that each group of a query chooses
    pool: int = 1
    every: int = 0  # positions of an entry; a key is its value then
    seed: int = 0
    queries: list[Any] = field(default_factory=list)
    keys: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)  # or entries
    tensors: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.queries:
            return
        draw = torch.Generator().manual_seed(self.seed)
        for count, length in zip(self.counts, self.lengths, strict=True):
            shape = self.groups, self.width + self.rotary
            self.queries.append(torch.randn(count, self.heads, shape[1], generator=draw).to(self.act))
            for side in (self.keys, self.values):
                side.append(torch.randn(length, *shape, generator=draw))
        longest = max(self.lengths)
        for name, shape in {
            "sinks": (self.heads,),
            "slopes": (self.heads,),
            "bias": (self.heads, 2 * 20 + 1),
            "scores": (sum(self.counts), self.heads * longest),
        }.items():
            made = torch.randn(shape, generator=draw) * (0.05 if name == "slopes" else 1.0)
            self.tensors[name] = made if name in self.changes else None
        if self.top:
            self.tensors["chosen"] = torch.full((sum(self.counts), self.groups * self.top), -1.0)
            for row, position in enumerate(self.positions):
                pools = (position + 1) // self.every if self.every else position // self.pool + 1
                for group in range(self.groups):
                    some = torch.randperm(pools, generator=draw)[: self.top].sort().values
                    begin = group * self.top
                    self.tensors["chosen"][row, begin : begin + len(some)] = some.float()

    @property
    def positions(self) -> list[int]:
        """The positions of all queries."""
        pairs = zip(self.counts, self.lengths, strict=True)
        return [position for count, length in pairs for position in range(length - count, length)]

    @property
    def scale(self) -> float:
        return float((self.width + self.rotary) ** -0.5)

    def part(self, begin: int, stop: int, sequence: int) -> Problem:
        """Tokens begin..stop-1 of a sequence's new ones, alone."""
        count, length = self.counts[sequence], self.lengths[sequence] - self.counts[sequence] + stop
        tensors = dict(self.tensors)
        for name in ("scores", "chosen"):
            if self.tensors.get(name) is not None:
                row = sum(self.counts[:sequence])
                tensors[name] = self.tensors[name][row + begin : row + stop]
        assert 0 <= begin < stop <= count
        return replace(
            self,
            counts=(stop - begin,),
            lengths=(length if not self.ahead else self.lengths[sequence],),
            queries=[self.queries[sequence][begin:stop]],
            keys=[self.keys[sequence]],
            values=[self.values[sequence]],
            tensors=tensors,
        )


def stored(x: Any, kept: Any) -> tuple[Any, Any]:
    """Values as a cache of a type holds them, with the scales by token and head of int8."""
    if kept != torch.int8:
        return x.to(kept), None
    scales = x.abs().amax(-1) / 127
    return torch.round(x / scales[..., None]).to(torch.int8), scales


def held(x: Any, kept: Any, factor: float = 1.0) -> Any:
    codes, scales = stored(x, kept)
    return codes.double() * (factor if scales is None else scales[..., None].double())


FIXED = 0.5  # scale of every FP8 head


def solve(
    run: Launcher,
    p: Problem,
    tile: AttentionTile = WHOLE,
    processors: int = 1,
    places: int = 0,
    spare: int = 0,
) -> Any:
    """The kernel's answer [T, N, H]. `places` seeds blocks and slots; `spare` pads the work list."""
    draw = np.random.default_rng(places)
    needed = [-(-length // p.block) for length in p.lengths]
    order = iter(draw.permutation(sum(needed) + 3).tolist())
    shape = (sum(needed) + 3, p.groups, p.block, p.width + p.rotary)
    poison = 77 if p.kept == torch.int8 else torch.nan
    shapes = [shape, (*shape[:2], -(-p.block // p.every), shape[3]) if p.every else shape]
    keys, values = (torch.full(own, poison).to(p.kept) for own in shapes)
    by_token = [torch.full(own[:3], torch.nan) for own in shapes]
    slots = draw.permutation(len(p.counts) + 2)[: len(p.counts)]
    table = torch.zeros(len(p.counts) + 2, max(needed) + 1, dtype=torch.int32)
    for b, length in enumerate(p.lengths):
        blocks = torch.tensor([next(order) for _ in range(needed[b])])
        table[int(slots[b]), : needed[b]] = blocks.int()
        at = torch.arange(length)
        for side, scales, new in ((keys, by_token[0], p.keys[b]), (values, by_token[1], p.values[b])):
            codes, found = stored(new[:length], p.kept)
            row = at % p.block
            if p.every and side is values:
                at = torch.arange(p.every - 1, length, p.every)
                codes, found, row = *stored(new[: len(at)], p.kept), at % p.block // min(p.every, p.block)
            side[blocks[at // p.block], :, row] = codes
            if found is not None:
                scales[blocks[at // p.block], :, row] = found
    fixed = p.kept.itemsize == 1 and p.kept != torch.int8
    scales = (
        [torch.full((p.groups,), FIXED), torch.full((p.groups,), FIXED * (2 if p.every else 1))]
        if fixed
        else by_token
        if p.kept == torch.int8
        else [None, None]
    )
    cu_q, kv_len = np.cumsum([0, *p.counts]).astype(np.int32), np.array(p.lengths, np.int32)
    about = WorkShape(p.heads, p.groups, tile, p.window, p.chunk, p.ahead, p.top * p.pool, p.every)
    work = work_list(cu_q, kv_len, about, processors)
    states = (max(work.partials, 1), about.head_tiles, tile.rows)
    width = 1 << (p.width - 1).bit_length()

    def items(rows: Any) -> Any:
        unused = np.full((spare, rows.shape[1]), -1, np.int32)
        return torch.from_numpy(np.concatenate([rows, unused])) if len(rows) + spare else None

    total = int(cu_q[-1])
    out = torch.full((total, p.heads * p.width), torch.nan, dtype=p.act)
    attend(
        run,
        torch.cat(p.queries).reshape(total, -1),
        LayerCache(keys, None if p.rotary or p.every else values, *scales),
        out,
        StepTensors(torch.from_numpy(cu_q), torch.from_numpy(kv_len), torch.from_numpy(slots.astype(np.int32)), table),
        WorkTensors(
            items(work.whole), items(work.split), items(work.merges),
            torch.full((*states, width), torch.nan), torch.full((*states, 2), torch.nan),
        ),
        about,
        p.scale,
        p.cap,
        Changes(
            **p.tensors, pool=p.pool, sets=p.groups if p.top else 1,
            entries=LayerCache(values, None, scales[1]) if p.every else None,
        ),
    )  # fmt: skip
    return out.reshape(total, p.heads, p.width)


def answer(p: Problem) -> Any:
    """Softmax over all that a query sees, in float64."""
    rows, first_row = [], 0
    fixed = FIXED if p.kept.itemsize == 1 else 1.0
    for b, (count, length) in enumerate(zip(p.counts, p.lengths, strict=True)):
        keys, values = (held(side[b][:length], p.kept, fixed) for side in (p.keys, p.values))
        if p.rotary:
            values = keys[..., : p.width]
        if p.every:
            entries = held(p.values[b][: length // p.every], p.kept, 2 * fixed if fixed < 1 else 1.0)
            keys = values = torch.cat([keys, entries])
        for i in range(count):
            position = length - count + i
            seen = torch.arange(length)
            mask = seen <= position + p.ahead
            if p.window:
                mask &= seen > position - p.window
            if p.chunk:
                mask &= seen >= position // p.chunk * p.chunk
            if p.every:
                ended = torch.arange(1, length // p.every + 1) * p.every <= position + 1
                mask, seen = torch.cat([mask, ended]), torch.cat([seen, torch.arange(len(ended))])
            every = mask
            for head in range(p.heads):
                group = head // (p.heads // p.groups)
                if p.top:
                    own = p.tensors["chosen"][first_row + i].reshape(p.groups, -1)[group]
                    listed = torch.isin(seen // p.pool, own.long())
                    if p.every:
                        listed[:length] = True
                    mask = every & listed
                s = keys[:, group] @ p.queries[b][i, head].double() * p.scale
                if p.cap:
                    s = p.cap * torch.tanh(s / p.cap)
                if p.tensors["slopes"] is not None:
                    s = s + p.tensors["slopes"][head] * (seen - position)
                if p.tensors["bias"] is not None:
                    s = s + p.tensors["bias"][head, (seen - position).clamp(-20, 20) + 20]
                if p.tensors["scores"] is not None:
                    s = s + p.tensors["scores"][first_row + i].reshape(p.heads, -1)[head, :length]
                weights = torch.exp(s) * mask
                sink = 0.0 if p.tensors["sinks"] is None else p.tensors["sinks"][head].double().exp()
                rows.append(weights @ values[:, group] / (weights.sum() + sink))
        first_row += count
    return torch.stack(rows).reshape(sum(p.counts), p.heads, p.width)
