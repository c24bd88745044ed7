"""How a model is divided among ranks: layers among pipeline stages, weights among the ranks of a stage.

Knows ArchSpec; reads no file. Within a stage it is Megatron's scheme (Shoeybi et al. 2019, arXiv:1909.08053): attention
is divided by heads, MLPs and experts by inner columns, the head by rows of the vocabulary. A rank's products end in a
part of a sum, so there is one all-reduce after attention and one after the MLP; all else is whole on each rank. Biases
of divided sums, and the residual, are added by rank 0. Cuts need not be even: the first ranks get more.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import msgspec
from msgspec.structs import replace

from quire.devices.protocol import KVDtype, KVLayer, KVSpec, Peers
from quire.errors import ConfigError
from quire.model.spec import ArchSpec, LayerShape

PANEL = 16
"""Rows of a packed panel: columns are cut at multiples of it if there are enough of them."""
MOST_RANKS = 64


Mixture = Literal["parts", "experts", "rows", "copy"]
"""A rank has a part of each expert, some whole experts, all but rows of the last projections, or everything."""


class Shard(msgspec.Struct, frozen=True):
    """One rank's share of a model: rank `rank` of `size` that compute stage `stage` of `stages` together.

    `peers` connects it to the others of its stage; None if the share is only measured. With `exact`, and for models
    that need it, no sum is divided: ranks gather the inputs of the projections that end attention and MLP, and each
    computes rows of their outputs. With `whole_experts` a rank has some experts of a mixture, not a part of each.
    """

    rank: int = 0
    size: int = 1
    peers: Peers | None = None
    stage: int = 0
    stages: int = 1
    exact: bool = False
    whole_experts: bool = False

    @property
    def whole(self) -> bool:
        """Whether this rank computes its layers alone."""
        return self.size == 1

    @property
    def alone(self) -> bool:
        """Whether this rank holds the whole model."""
        return self.size == self.stages == 1

    def layers(self, spec: ArchSpec) -> range:
        """The layers of this stage. ConfigError: the model has too few layers, or none where it could be parted."""
        if self.stages == 1:
            return range(spec.num_layers)
        places = [i for i in range(1, spec.num_layers) if spec.parts_before(i)]
        if len(places) < self.stages - 1:
            raise ConfigError(
                f"--pipeline-parallel-size {self.stages}: {spec.architecture} with {spec.num_layers} layers can be "
                f"parted into at most {len(places) + 1} stages"
            )
        bounds = [0]
        for stage, wanted in enumerate(even(spec.num_layers, self.stages)[1:], 1):
            later = self.stages - 1 - stage  # bounds that must still find a place
            free = [place for place in places if place > bounds[-1]]
            bounds.append(
                min(free[: len(free) - later], key=lambda place: (abs(place - wanted.start), place))
            )
        bounds.append(spec.num_layers)
        return range(bounds[self.stage], bounds[self.stage + 1])

    def embeds(self, spec: ArchSpec) -> bool:
        """Whether this stage looks tokens up in the embedding."""
        return self.stage == 0 or spec.per_layer is not None

    @property
    def begins(self) -> bool:
        """Whether this is the first stage."""
        return self.stage == 0

    @property
    def ends(self) -> bool:
        """Whether this is the last stage, which has the final norm and the head."""
        return self.stage == self.stages - 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def gathers(self, spec: ArchSpec) -> bool:
        """Whether ranks gather inputs of projections in place of adding outputs; a norm of them needs all inputs."""
        return not self.whole and (self.exact or spec.inner_norms or spec.gate_cutoffs is not None)

    def divides_attention(self, spec: ArchSpec) -> bool:
        """Whether attention is divided by heads. It is whole on each rank if something looks at all heads together."""
        apart = spec.qk_norm != "all_heads" and spec.position_buckets is None and spec.relative is None
        return not self.whole and apart

    def mixture(self, spec: ArchSpec) -> Mixture:
        """What each rank has of a mixture."""
        if self.whole_experts and not self.whole:
            return "experts"
        if not self.gathers(spec) or spec.moe is None:
            return "parts"
        return "copy" if spec.moe.zero_experts else "rows"

    def experts(self, spec: ArchSpec) -> range:
        """The routed experts that this rank has, or has a part of.

        The first rank has those that return their input, unless all ranks have all, or they too are spread.
        """
        if spec.moe is None:
            return range(0)
        count, kind = spec.moe.routing.num_experts, self.mixture(spec)
        if kind == "experts":
            return even(count, self.size)[self.rank]
        return range(count if self.first or kind == "copy" else count - spec.moe.zero_experts)

    def expert_columns(self, spec: ArchSpec, size: int, shared: bool = False) -> range:
        """The inner columns of a routed expert, or the shared one, on this rank."""
        kind = self.mixture(spec)
        divided = kind == "parts" or (kind == "experts" and shared)
        return self.columns(size) if divided else range(size)

    def spread(self, spec: ArchSpec, layer: int) -> list[int]:
        """The number of query heads of each rank."""
        return [len(replace(self, rank=rank).heads(spec, layer)[0]) for rank in range(self.size)]

    def heads(self, spec: ArchSpec, layer: int) -> tuple[range, range]:
        """The query and key/value heads of a layer on this rank: whole groups of one key/value head, or a part of one.

        Ranks that share a group all hold its key/value head. Latent attention has one such head for all.
        """
        shape = spec.shape(layer)
        groups = 1 if spec.latent is not None else shape.num_kv_heads
        if not self.divides_attention(spec) or not groups:
            return range(shape.num_heads), range(groups)
        each = shape.num_heads // groups
        if groups >= self.size:
            kv = even(groups, self.size)[self.rank]
            return range(kv.start * each, kv.stop * each), kv
        group, ranks = next(
            (g, ranks) for g, ranks in enumerate(even(self.size, groups)) if self.rank in ranks
        )
        own = even(each, len(ranks))[self.rank - ranks.start]
        return range(group * each + own.start, group * each + own.stop), range(group, group + 1)

    def columns(self, size: int) -> range:
        """The inner columns of an MLP, or rows of the head, of this rank."""
        return _cuts(size, self.size)[self.rank]

    def widths(self, size: int) -> list[int]:
        """The number of `columns` of each rank."""
        return [len(part) for part in _cuts(size, self.size)]

    def kv_spec(self, spec: ArchSpec, dtype: KVDtype) -> KVSpec:
        """The KV cache of this rank. That of latent attention is whole on each rank of a stage."""
        whole, own = spec.kv_spec(dtype), self.layers(spec)
        if self.alone:
            return whole
        layers = tuple(whole.layer(i) for i in own)
        if self.divides_attention(spec) and spec.latent is None:
            layers = tuple(
                KVLayer(len(self.heads(spec, i)[1]) if layer.num_kv_heads else 0, layer.head_dim)
                for i, layer in zip(own, layers, strict=True)
            )
        if whole.layers is None:
            heads = layers[0].num_kv_heads
            return replace(whole, num_layers=len(own), num_kv_heads=heads)
        return replace(whole, num_layers=len(own), layers=layers)

    def messages(self, spec: ArchSpec) -> list[int]:
        """The activations per token that this rank sends to each other one of its stage: one entry per message."""
        found: list[int] = []
        width, gathers = spec.hidden_size, self.gathers(spec)
        for i in self.layers(spec) if not self.whole else ():
            shape, sums = spec.shape(i), 0
            value = shape.head_dim if spec.latent is None else spec.latent.value_dim
            if spec.attends(i) and self.divides_attention(spec):
                found += [len(self.heads(spec, i)[0]) * value] if gathers else []
                sums += 1
            if spec.is_dense(i):
                gathered = 1 if spec.gate_cutoff(i) is None else 2  # a sparse gate, and what it multiplies
                found += [len(self.columns(shape.intermediate_size))] * gathered if gathers else []
                sums += 1
            if spec.parallel and sums == 2 and not gathers:
                sums = 1
            if spec.is_sparse(i) and (kind := self.mixture(spec)) != "copy":
                found.append(len(self.columns(width)) if kind == "rows" else width)
            found += [len(self.columns(width)) if gathers else width] * sums
        return found

    def sent_bytes(self, spec: ArchSpec) -> int:
        """Bytes of activations that this rank sends to each other rank of its stage for one token, without logits."""
        return 4 * sum(self.messages(spec))

    def passed_bytes(self, spec: ArchSpec) -> int:
        """Bytes of activations that this stage sends to the next one for one token."""
        return 0 if self.ends else 4 * spec.stream_width

    def divided(self, exact: bool, whole_experts: bool, where: str) -> Shard:
        """The share of weights that lie divided at `where`. ConfigError: they are not divided as is asked for."""
        for flag, asked, given in (
            ("--exact-across-ranks", self.exact, exact),
            ("--enable-expert-parallel", self.whole_experts, whole_experts),
        ):
            if asked and not given and not self.whole:
                raise ConfigError(
                    f"{where} was made without {flag}: make it again with the option, or leave it out"
                )
        return replace(self, exact=exact, whole_experts=whole_experts)

    def check(self, spec: ArchSpec) -> None:
        """Raise ConfigError, naming the sizes that fit, if the model cannot be divided so."""
        self.layers(spec)
        if self.whole:
            return
        if self.whole_experts and (spec.moe is None or spec.moe.routing.num_experts < self.size):
            raise ConfigError(
                f"--enable-expert-parallel: {spec.architecture} has fewer than {self.size} experts: leave it out"
            )
        if not self._fits(spec, self.size):
            sizes = [str(size) for size in range(1, MOST_RANKS + 1) if self._fits(spec, size)]
            raise ConfigError(
                f"--tensor-parallel-size {self.size}: {spec.num_heads} heads with {spec.num_kv_heads} key/value heads "
                f"can be divided among {', '.join(sizes)} ranks"
            )

    def _fits(self, spec: ArchSpec, size: int) -> bool:
        shapes: Sequence[LayerShape] = spec.shapes or (spec.shape(0),)
        heads = [
            (shape.num_heads, 1 if spec.latent else shape.num_kv_heads)
            for shape in shapes
            if shape.num_heads and self.divides_attention(spec)
        ]
        inner = [shape.intermediate_size for shape in shapes if shape.intermediate_size]
        if spec.moe is not None:
            inner += [] if self.whole_experts else [spec.moe.intermediate_size]
            inner += [spec.moe.shared_intermediate_size] * bool(spec.moe.shared_intermediate_size)
        fits = all(n // g >= -(-size // g) for n, g in heads if g < size)
        return fits and all(columns >= size for columns in (*inner, spec.vocab_size))


WHOLE = Shard()


def even(total: int, parts: int) -> list[range]:
    """`total` things in `parts` runs, as even as can be; the first ones are longer."""
    size, longer = divmod(total, parts)
    starts = [i * size + min(i, longer) for i in range(parts + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def _cuts(size: int, parts: int) -> list[range]:
    unit = PANEL if size >= PANEL * parts else 1
    return [range(r.start * unit, min(r.stop * unit, size)) for r in even(-(-size // unit), parts)]
