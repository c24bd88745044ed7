"""Parts of a spec that few families have: several residual streams, scores of distances. Plain structs."""

from __future__ import annotations

import msgspec


class AltUpSpec(msgspec.Struct, frozen=True):
    """Alternating updates (Baykal et al. 2023, arXiv:2301.13310) of several residual streams.

    A layer predicts all `streams`, computes the `active` one, and corrects all by the result. `scaled`: the active
    stream gates inputs by layer times a learned vector.
    """

    streams: int
    active: int
    scaled: bool


class RelativeSpec(msgspec.Struct, frozen=True):
    """Disentangled attention (DeBERTa, He et al. 2021, arXiv:2006.03654): scores of content with distance.

    `span` distances each way have embeddings (rope.relative_places); `normed`: they are normed. Queries meet a key made
    of the distance's embedding if `by_query`, keys a query made of it if `by_key`. `shared`: the layer's own
    projections make both.
    """

    span: int
    buckets: int
    reach: int
    by_query: bool
    by_key: bool
    shared: bool
    normed: bool
