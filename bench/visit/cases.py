"""Problems of random numbers for each kind of kernel: rows to compute, and the same in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.visit import catalog
from bench.visit.place import Place
from quire.devices.cuda.kernels import experts, norm, packed, products
from quire.devices.cuda.kernels.attention import LayerCache, StepTensors, attend, work_tensors
from quire.devices.cuda.tiles import AttentionTile, attention_tiles
from quire.devices.cuda.work import WorkShape, work_list

FP8 = catalog.FP8
PACKED = {
    **{name: about for name, about in catalog.PACKED.items() if not about[0].table},
    "FP8": (packed.Form(FP8), False),
}
FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CACHES = {**FLOATS, "int8": torch.int8, "FP8 e4m3": FP8, "FP8 e5m2": torch.float8_e5m2}
CLOSE = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 5e-6}
Rows = Callable[[Any], Any]  # computes the rows that a slice picks
Part = tuple[int, int, int]  # a sequence, and the positions of the tokens that are computed: first, stop


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel over `rows` rows: `compute` launches it for some of them, `exact` is the same in float64."""

    name: str
    rows: int
    compute: Rows
    exact: Rows
    close: float = CLOSE[torch.bfloat16]


class Weight:
    """A weight [O, K] as kernels read it."""

    def __init__(self, place: Place, kind: str, outputs: int, columns: int, seed: int = 0) -> None:
        self.place, self.columns, self.act = place, columns, FLOATS.get(kind, torch.bfloat16)
        form, self.integer = PACKED.get(kind, (packed.Form(self.act), False))
        self.codes, self.packed = place.draw(outputs, columns, dtype=form.number, seed=seed), None
        self.nbytes = self.codes.nbytes
        if kind in PACKED:
            scales = place.scales(outputs, -(-columns // form.group) if form.group else 1)
            offsets = scales if form.offsets else None
            self.packed = packed.PackedWeight.pack(form, self.codes, scales, offsets=offsets)
            self.nbytes = sum(tensor.nbytes for tensor in self.packed.tensors if tensor is not None)

    def values(self) -> Any:
        """Decode it to float64."""
        if self.packed is None:
            return self.codes.double()
        return self.packed.values().double()

    def rounded(self, x: Any) -> tuple[Any, Any]:
        """Activations as the product takes them: codes and scales, or x itself and None."""
        if not self.integer:
            return x, None
        codes, scales = torch.empty_like(x, dtype=torch.int8), self.place.empty(len(x), dtype=torch.float32)
        packed.round_rows(self.place.run, x, codes, scales)
        return codes, scales

    def multiply(self, x: Any, scales: Any, out: Any, gated: bool) -> None:
        run, act = self.place.run, "silu" if gated else None
        if self.packed is not None:
            packed.linear(run, x, self.packed, out, activation=act, x_scales=scales, is_gated=gated)
        elif gated:
            products.gated(run, x, self.codes, out, "silu")
        else:
            products.linear(run, x, self.codes, out)


def product(place: Place, kind: str, rows: int, outputs: int, columns: int, gated: bool = False) -> Case:
    weight = Weight(place, kind, outputs * (2 if gated else 1), columns)
    x = place.draw(rows, columns, dtype=weight.act) / 8

    def compute(picked: Any) -> Any:
        out = place.empty(len(x[picked]), outputs, dtype=weight.act)
        weight.multiply(*weight.rounded(x[picked].contiguous()), out, gated)
        return out

    def exact(picked: Any) -> Any:
        codes, scales = weight.rounded(x[picked].contiguous())
        y = codes.double() * (1.0 if scales is None else scales[:, None].double()) @ weight.values().T
        return torch.nn.functional.silu(y[:, ::2]) * y[:, 1::2] if gated else y

    name = f"{'gated ' if gated else ''}product, {kind}, {outputs} x {columns}"
    return Case(name, rows, compute, exact, CLOSE[weight.act])


def normalized(place: Place, rows: int, width: int) -> Case:
    x, weight = place.draw(rows, width), place.scales(width)

    def compute(picked: Any) -> Any:
        out = place.empty(*x[picked].shape)
        norm.normalize(place.run, x[picked].contiguous(), out, norm.NormTensors("rms", weight, None, 1e-5))
        return out

    def exact(picked: Any) -> Any:
        some = x[picked].double()
        return some / torch.sqrt((some * some).mean(1, keepdim=True) + 1e-5) * weight.double()

    return Case(f"RMSNorm of {width}", rows, compute, exact)


def mixture(place: Place, rows: int, width: int, inner: int, count: int, chosen: int) -> Case:
    """A layer of experts, of which each row chooses other ones."""
    ups, downs = (
        [place.draw(*shape, seed=i) / 8 for i in range(count)]
        for shape in ((2 * inner, width), (width, inner))
    )
    x, weights = place.draw(rows, width), place.scales(rows, chosen)
    ids = place.numbers((torch.arange(rows)[:, None] * 3 + torch.arange(chosen)) % count)
    tables = (
        experts.Weights(experts.addresses(some, place.tensors), torch.bfloat16) for some in (ups, downs)
    )
    aligned = width % 128 == inner % 128 == 0
    sizes = place.numbers([inner] * count)
    about = experts.Experts(*tables, sizes, inner, "silu", aligned=aligned)

    def compute(picked: Any) -> Any:
        some = x[picked].contiguous()
        room = experts.expert_scratch(place.run, some, chosen, about, width, place.empty)
        out = place.empty(len(some), width)
        experts.run_experts(place.run, some, ids[picked], weights[picked], about, room, out)
        return out

    def exact(picked: Any) -> Any:
        some, out = x[picked].double(), torch.zeros_like(x[picked]).double()
        for row, numbers in enumerate(ids[picked].tolist()):
            for number, by in zip(numbers, weights[picked][row].double(), strict=True):
                y = ups[number].double() @ some[row]
                out[row] += by * (downs[number].double() @ (torch.nn.functional.silu(y[::2]) * y[1::2]))
        return out

    return Case(f"experts, {chosen} of {count}", rows, compute, exact, 1e-2)


def row_cases(place: Place) -> list[partial[Case]]:
    """Every kind of kernel whose rows must not follow each other, in an odd shape and in one of an 8B model."""
    rows, shapes = (70, [(40, 272)]) if place.small else (2048, [(1000, 272), (4096, 4096)])
    return [
        partial(normalized, place, *((18, 64) if place.small else (2048, 4096))),
        partial(mixture, place, *((20, 32, 48, 4, 2) if place.small else (512, 2048, 768, 32, 4))),
        *(partial(product, place, kind, rows, *shape) for shape in shapes for kind in [*FLOATS, *PACKED]),
        *(partial(product, place, "bfloat16", rows, *shape, gated=True) for shape in shapes),
    ]


class Paged:
    """Attention over a paged cache of random numbers, with queries of each sequence's `last` positions.

    If `rotary`, the cache is latent: values are the first `width` of a key.
    """

    def __init__(
        self,
        place: Place,
        lengths: list[int],
        kept: Any,
        heads: int,
        groups: int,
        width: int,
        rotary: int = 0,
        last: int = 1,
        block: int = 64,
    ) -> None:
        self.place, self.heads, self.groups, self.width, self.rotary = place, heads, groups, width, rotary
        self.lengths, self.kept, self.block, whole = lengths, kept, block, width + rotary
        self.act = kept if kept in (torch.float16, torch.float32) else torch.bfloat16
        self.scale = whole**-0.5
        needed = [-(-length // block) for length in lengths]
        order, table = np.random.default_rng(0).permutation(sum(needed)), np.zeros((len(needed), max(needed)))
        for i, count in enumerate(needed):
            table[i, :count], order = order[:count], order[count:]
        self.table, shape = place.numbers(table), (sum(needed), groups, block, whole)
        drawn = torch.int8 if kept == torch.int8 else torch.bfloat16
        sides: list[Any] = [place.draw(*shape, dtype=drawn, seed=i).to(kept) for i in range(2)]
        scales: Any = None
        if kept.itemsize == 1:
            scales = place.scales(groups) if kept != torch.int8 else place.scales(*shape[:3], factor=0.01)
        self.cache = LayerCache(sides[0], None if rotary else sides[1], scales, scales)
        counts = [min(last, length) for length in lengths]
        self.q = [place.draw(n, heads * whole, seed=i).to(self.act) for i, n in enumerate(counts)]
        self.parts: list[Part] = [(i, lengths[i] - n, lengths[i]) for i, n in enumerate(counts)]

    def prepare(
        self, parts: list[Part], many: bool, processors: int, tile: AttentionTile | None = None
    ) -> tuple[Callable[[], None], Any]:
        """Return what launches attention of these tokens, and its result, which that fills."""
        place = self.place
        tiles = attention_tiles(place.run.target.family, self.width, self.kept == torch.int8, self.rotary > 0)
        shape = WorkShape(self.heads, self.groups, tile or (tiles.many if many else tiles.few))
        cu_q = np.cumsum([0, *(stop - first for _, first, stop in parts)]).astype(np.int32)
        kv_len = np.array([stop for *_, stop in parts], np.int32)
        work = work_list(cu_q, kv_len, shape, processors)
        starts = [first - self.parts[i][1] for i, first, _ in parts]
        rows = [self.q[i][at : at + b - a] for (i, a, b), at in zip(parts, starts, strict=True)]
        q = torch.cat(rows)
        out = place.empty(len(q), self.heads * self.width, dtype=self.act)
        slots = place.numbers([i for i, *_ in parts])
        step = StepTensors(place.numbers(cu_q), place.numbers(kv_len), slots, self.table)
        tensors = work_tensors(work, shape, self.width, place.numbers, place.empty)
        return lambda: attend(place.run, q, self.cache, out, step, tensors, shape, self.scale), out

    def solve(
        self, parts: list[Part], many: bool = False, processors: int = 1, tile: AttentionTile | None = None
    ) -> Any:
        call, out = self.prepare(parts, many, processors, tile)
        call()
        return out

    def exact(self, sequence: int) -> Any:
        """The answer of its last position by softmax over all that it sees, in float64 [N H]."""
        places = torch.arange(self.lengths[sequence], device=self.place.tensors)
        blocks, within = self.table[sequence][places // self.block].long(), places % self.block
        scales, sides = self.cache.key_scales, []
        for side in (self.cache.keys, self.cache.keys if self.rotary else self.cache.values):
            factor = 1.0
            if scales is not None:
                factor = (scales if scales.ndim == 1 else scales[blocks, :, within])[..., None].double()
            sides.append(side[blocks, :, within].double() * factor)  # [tokens, G, width]
        keys, values = sides[0], sides[1][..., : self.width]
        q = self.q[sequence][-1].double().reshape(self.groups, -1, keys.shape[-1])
        weights = torch.softmax(torch.einsum("gnh,tgh->gnt", q, keys) * self.scale, -1)
        return torch.einsum("gnt,tgh->gnh", weights, values).reshape(-1)
