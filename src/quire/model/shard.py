"""Divides a model among ranks: layers among pipeline stages, weights among the ranks of a stage.

Knows sizes; reads no file. Within a stage it is Megatron's scheme (Shoeybi et al. 2019, arXiv:1909.08053): attention
is divided by heads, MLPs and experts by inner columns, the head by rows of the vocabulary. A rank's products end in a
part of a sum, so there is one all-reduce after attention and one after the MLP; all else is whole on each rank. Biases
of divided sums, and the residual, are added by rank 0. Cuts need not be even: the first ranks get more.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
from msgspec.structs import replace

from quire.devices.graph import Recorder
from quire.devices.ops import AllGather, AllReduce, Value
from quire.devices.protocol import Peers
from quire.errors import ConfigError

PANEL = 16
"""A packed panel has PANEL rows: columns are cut at multiples of PANEL if there are enough of them."""
MOST_RANKS = 64


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

    @property
    def gathers(self) -> bool:
        """Whether ranks gather inputs of projections in place of adding outputs."""
        return self.exact and not self.whole

    def heads(self, num_heads: int, groups: int, separable: bool) -> tuple[range, range]:
        """Choose the query and key/value heads of this rank: whole groups of one key/value head, or a part of one.

        Ranks that share a group all hold its key/value head. Attention that is not `separable` is whole on each rank.
        """
        if self.whole or not separable or not groups:
            return range(num_heads), range(groups)
        each = num_heads // groups
        if groups >= self.size:
            kv = even(groups, self.size)[self.rank]
            return range(kv.start * each, kv.stop * each), kv
        group, ranks = next(
            (g, ranks) for g, ranks in enumerate(even(self.size, groups)) if self.rank in ranks
        )
        own = even(each, len(ranks))[self.rank - ranks.start]
        return range(group * each + own.start, group * each + own.stop), range(group, group + 1)

    def gather(self, g: Recorder, part: Value, widths: Sequence[int], unrounded: bool = False) -> Value:
        """Gather the columns of all ranks: see AllGather."""
        return part if self.whole else g(AllGather(part, widths, self.peers, unrounded))

    def gather_heads(self, g: Recorder, part: Value, num_heads: int, groups: int, size: int) -> Value:
        """Gather query heads, of `size` columns each, where ranks gather inputs of projections; else return `part`."""
        if not self.gathers:
            return part
        ranks = (replace(self, rank=rank) for rank in range(self.size))
        widths = [len(rank.heads(num_heads, groups, True)[0]) * size for rank in ranks]
        return self.gather(g, part, widths)

    def sum(self, g: Recorder, part: Value) -> Value:
        """Sum the parts that the ranks computed."""
        return part if self.whole else g(AllReduce(part, self.peers, self.size))

    def columns(self, size: int) -> range:
        """Choose the inner columns of an MLP, or rows of the head, of this rank."""
        return _cuts(size, self.size)[self.rank]

    def widths(self, size: int) -> list[int]:
        """Count the `columns` of each rank."""
        return [len(part) for part in _cuts(size, self.size)]

    def divided(self, exact: bool, whole_experts: bool, where: str) -> Shard:
        """Return the share of weights stored divided at `where`. ConfigError: they are divided in another way."""
        for flag, asked, given in (
            ("--exact-across-ranks", self.exact, exact),
            ("--enable-expert-parallel", self.whole_experts, whole_experts),
        ):
            if asked and not given and not self.whole:
                raise ConfigError(
                    f"{where} was made without {flag}: make it again with the option, or leave it out"
                )
        return replace(self, exact=exact, whole_experts=whole_experts)


WHOLE = Shard()


def even(total: int, parts: int) -> list[range]:
    """Divide `total` things into `parts` runs, as evenly as possible; the first ones are longer."""
    size, longer = divmod(total, parts)
    starts = [i * size + min(i, longer) for i in range(parts + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def _cuts(size: int, parts: int) -> list[range]:
    unit = PANEL if size >= PANEL * parts else 1
    return [range(r.start * unit, min(r.stop * unit, size)) for r in even(-(-size // unit), parts)]
