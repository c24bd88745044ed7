"""DFlash: drafts of a whole block in one pass. Its layers see the target's features as keys and values of the context.

A block is the newest token and masks; inside it attention goes both ways. Only the context is kept in the cache.
"""

from __future__ import annotations

from msgspec.structs import replace

from quire.devices.graph import Recorder, record
from quire.devices.ops import Embed, Linear, Normalize, Receive, RopeAngles, SelectRows, StoreKV, Value
from quire.devices.protocol import KVSpec, Matrix, Norm
from quire.errors import ModelError
from quire.model.decoder import Layers
from quire.model.loaded import LoadedModel
from quire.model.rope import make_rope
from quire.model.spec import ArchSpec
from quire.model.weights import LayerWeights
from quire.spec_decode.head import Head, HeadSource, integer
from quire.spec_decode.heads.layer import layer_spec, plain_layer


def read_dflash(source: HeadSource, target: LoadedModel) -> Head:
    """ModelError: the drafter does not fit the target."""
    config, path = source.config, source.path
    spec, width, vocab = layer_spec(config, path), target.spec.hidden_size, target.spec.vocab_size
    own = config.get("dflash_config") or {}
    size = integer(config, "block_size", path, 16)
    mask = integer(own, "mask_token_id", path)
    count = target.spec.num_layers
    taps = own.get("target_layer_ids")
    if taps is None:
        span = max(1, spec.num_layers - 1)
        taps = [round(1 + i * (count - 4) / span) for i in range(spec.num_layers)]
    if not taps or not all(type(tap) is int and 0 <= tap < count for tap in taps):
        raise ModelError(f"{path}: target_layer_ids {taps} are not layers of the target, which has {count}")
    if spec.hidden_size != width or mask >= vocab or size < 2:
        raise ModelError(
            f"{path}: a drafter {spec.hidden_size} wide with mask token {mask} and blocks of {size} does not fit its "
            f"target, {width} wide with {vocab} tokens"
        )
    graph = DFlash(
        replace(spec, bidirectional=True),
        target,
        source.matrix(["fc.weight"], [width], len(taps) * width),
        source.norm("hidden_norm", width, spec.norm_eps),
        tuple(plain_layer(source, spec, i, f"layers.{i}.") for i in range(spec.num_layers)),
        source.norm("norm", width, spec.norm_eps),
    )
    source.refuse_left()
    layers = range(spec.num_layers)
    return Head(
        first=record(graph.context, None, vocab, width, layers),
        block=record(graph.hidden, graph.head, vocab, width, layers),
        kv_spec=KVSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, target.dtype),
        taps=tuple(taps),
        num_tokens=size - 1,
        most=size - 1,
        mask_token=mask,
        weight_bytes=source.nbytes,
    )


class DFlash:
    """Two graphs over one cache: what the context adds to it, and a block."""

    def __init__(
        self,
        spec: ArchSpec,
        target: LoadedModel,
        fc: Matrix,
        hidden_norm: Norm,
        layers: tuple[LayerWeights, ...],
        norm: Norm,
    ) -> None:
        self.spec, self.head = spec, target.decoder.head
        self._embedding = target.weights.table
        self._fc, self._hidden_norm, self._weights, self._norm = fc, hidden_norm, layers, norm
        self._layers = Layers(spec)

    def context(self, g: Recorder) -> Value:
        """Keys and values of the target's features go into the cache of every layer."""
        c = g(Normalize(g(Linear(g(Receive(self._fc.shape[1])), self._fc)), self._hidden_norm))
        for index, layer in enumerate(self._weights):
            rope, weights = self.spec.rope_of(index), layer.attention
            assert weights is not None
            assert weights.qkv is not None
            angles = None if rope is None else g(RopeAngles(make_rope(rope)))
            qkv = g(Linear(c, weights.qkv, weights.qkv_bias))
            g(StoreKV(qkv, index, self.spec.num_heads, angles, weights.q_norm, weights.k_norm))
        return c

    def hidden(self, g: Recorder) -> Value:
        """The block's tokens -> final hidden states of the logit rows."""
        x = g(Embed(self._embedding))
        ropes = {rope for rope in map(self.spec.rope_of, range(self.spec.num_layers)) if rope is not None}
        angles = {rope: g(RopeAngles(make_rope(rope))) for rope in ropes}
        for index, layer in enumerate(self._weights):
            x = self._layers.layer(g, x, angles, index, index, layer)
        return g(Normalize(g(SelectRows(x)), self._norm))
