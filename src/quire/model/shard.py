"""How each weight of a model is divided among the ranks of tensor parallelism. Knows ArchSpec; reads no file.

Megatron's scheme (Shoeybi et al. 2019, arXiv:1909.08053): attention is divided by heads, MLPs and experts by inner
columns, the head by rows of the vocabulary. A rank's products end in a part of a sum, so there is one all-reduce after
attention and one after the MLP; all else is whole on each rank. Biases of divided sums, and the residual, are added by
rank 0. Cuts need not be even: the first ranks get more.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from quire.devices.protocol import KVDtype, KVLayer, KVSpec, Peers
from quire.errors import ConfigError
from quire.model.spec import ArchSpec, LayerShape

PANEL = 16
"""Rows of a packed panel: columns are cut at multiples of it if there are enough of them."""
MOST_RANKS = 64


class Shard(msgspec.Struct, frozen=True):
    """One rank's share of a model. `peers` connects it to the others; None if the share is only measured."""

    rank: int = 0
    size: int = 1
    peers: Peers | None = None

    @property
    def whole(self) -> bool:
        return self.size == 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def heads(self, spec: ArchSpec, layer: int) -> tuple[range, range]:
        """The query and key/value heads of a layer on this rank: whole groups of one key/value head, or a part of one.

        Ranks that share a group all hold its key/value head. Latent attention has one such head for all.
        """
        shape = spec.shape(layer)
        groups = 1 if spec.latent is not None else shape.num_kv_heads
        if self.whole or not groups:
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
        """The KV cache of this rank. That of latent attention is whole on each."""
        whole = spec.kv_spec(dtype)
        if self.whole or spec.latent is not None:
            return whole
        kept = [whole.layer(i) for i in range(spec.num_layers)]
        layers = tuple(
            KVLayer(len(self.heads(spec, i)[1]) if layer.num_kv_heads else 0, layer.head_dim)
            for i, layer in enumerate(kept)
        )
        if whole.layers is None:
            return msgspec.structs.replace(whole, num_kv_heads=layers[0].num_kv_heads)
        return msgspec.structs.replace(whole, layers=layers)

    def summed_bytes(self, spec: ArchSpec) -> int:
        """Bytes of activations that each rank adds up with the others for one token, without its logits."""
        sums = sum(
            int(spec.attends(i)) + int(spec.is_dense(i)) + int(spec.is_sparse(i))
            for i in range(spec.num_layers)
        )
        return 0 if self.whole else 4 * spec.hidden_size * sums

    def check(self, spec: ArchSpec) -> None:
        """Raise ConfigError, naming the sizes that fit, if the model cannot be divided so."""
        if self.whole:
            return
        for missing, what in (
            (spec.inner_norms, "a norm of all heads, or of the whole inner width of its MLP"),
            (spec.qk_norm == "all_heads", "a norm of the queries and keys of all heads together"),
            (spec.position_buckets is not None, "a bias of positions by head"),
            (spec.moe is not None and spec.moe.zero_experts > 0, "experts that return their input"),
        ):
            if missing:
                raise ConfigError(
                    f"--tensor-parallel-size {self.size}: {spec.architecture} has {what}, which is not divided yet; "
                    "leave the option out"
                )
        if not _fits(spec, self.size):
            sizes = [str(size) for size in range(1, MOST_RANKS + 1) if _fits(spec, size)]
            raise ConfigError(
                f"--tensor-parallel-size {self.size}: {spec.num_heads} heads with {spec.num_kv_heads} key/value heads "
                f"can be divided among {', '.join(sizes)} ranks"
            )


WHOLE = Shard()


def even(total: int, parts: int) -> list[range]:
    """`total` things in `parts` runs, as even as can be; the first ones are longer."""
    size, longer = divmod(total, parts)
    starts = [i * size + min(i, longer) for i in range(parts + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def _cuts(size: int, parts: int) -> list[range]:
    unit = PANEL if size >= PANEL * parts else 1
    return [range(r.start * unit, min(r.stop * unit, size)) for r in even(-(-size // unit), parts)]


def _fits(spec: ArchSpec, size: int) -> bool:
    shapes: Sequence[LayerShape] = spec.shapes or (spec.shape(0),)
    heads = [
        (shape.num_heads, 1 if spec.latent else shape.num_kv_heads) for shape in shapes if shape.num_heads
    ]
    inner = [shape.intermediate_size for shape in shapes if shape.intermediate_size]
    if spec.moe is not None:
        inner.append(spec.moe.intermediate_size)
        inner += [spec.moe.shared_intermediate_size] * bool(spec.moe.shared_intermediate_size)
    fits = all(n // g >= -(-size // g) for n, g in heads if g < size)
    return fits and all(columns >= size for columns in (*inner, spec.vocab_size))
