"""EAGLE-1 and 2 (Li et al. 2024, arXiv:2401.15077, 2406.16858): a layer over the token's embedding and the final hidden
state of the target; the target's own head. HASS has the same files.
"""

from __future__ import annotations

from functools import partial

from quire.devices.graph import Graph, Recorder, record
from quire.devices.ops import Embed, Linear, Normalize, Receive, RopeAngles, SelectRows, Tap, Value
from quire.devices.protocol import FloatArray, KVSpec, Matrix, Norm
from quire.errors import ModelError
from quire.model.decoder import Layers
from quire.model.loaded import LoadedModel
from quire.model.rope import make_rope
from quire.model.spec import ArchSpec
from quire.model.weights import LayerWeights
from quire.spec_decode.head import Head, HeadSource
from quire.spec_decode.heads.layer import layer_spec, plain_layer


def read_eagle(source: HeadSource, target: LoadedModel) -> Head:
    """ModelError: the head does not fit the target."""
    spec, width, vocab = (
        layer_spec(source.config, source.path),
        target.spec.hidden_size,
        target.spec.vocab_size,
    )
    if spec.hidden_size != width:
        raise ModelError(
            f"{source.path}: the head is {spec.hidden_size} wide and its target {width}: use a head made for the target"
        )
    embedding = target.weights.table
    if source.has("embed_tokens.weight"):
        embedding = source.matrix(["embed_tokens.weight"], [vocab], width, use="table")
    token_half = source.matrix(["fc.weight"], [width], 2 * width, lambda array: array[:, :width])
    hidden_half = source.matrix(["fc.weight"], [width], 2 * width, lambda array: array[:, width:])
    graph = Eagle(
        spec,
        target,
        embedding,
        (token_half, hidden_half),
        source.vector("fc.bias", width) if source.has("fc.bias") else None,
        plain_layer(source, spec, 0, "layers.0.", first_norm=False),
    )
    source.refuse_left(("rotary_emb", "lm_head", "embed_tokens"))

    def made(feed: bool) -> Graph:
        return record(partial(graph.hidden, feed=feed), graph.head, vocab, width, range(1), (0,))

    return Head(
        first=made(True),
        again=made(False),
        kv_spec=KVSpec(1, spec.num_kv_heads, spec.head_dim, target.dtype),
        taps=(target.spec.num_layers - 1,),
        weight_bytes=source.nbytes,
    )


class Eagle:
    """The graph of a head. With `feed` it starts from the target's last layer, else from its own output."""

    def __init__(
        self,
        spec: ArchSpec,
        target: LoadedModel,
        embedding: Matrix,
        fc: tuple[Matrix, Matrix],
        fc_bias: FloatArray | None,
        layer: LayerWeights,
    ) -> None:
        self.spec, self.head = spec, target.decoder.head
        self._norm: Norm | None = target.weights.norm
        self._embedding, self._fc, self._fc_bias, self._layer = embedding, fc, fc_bias, layer
        self._layers = Layers(spec)

    def hidden(self, g: Recorder, feed: bool) -> Value:
        x = g(Receive(self.spec.hidden_size))
        if feed and self._norm is not None:
            x = g(Normalize(x, self._norm))
        token = g(Linear(g(Embed(self._embedding)), self._fc[0], self._fc_bias))
        z = g(Linear(x, self._fc[1], residual=token))
        assert self.spec.rope is not None
        angles = {self.spec.rope: g(RopeAngles(make_rope(self.spec.rope)))}
        y = self._layers.layer(g, z, angles, 0, 0, self._layer)
        g(Tap(y))
        return g(SelectRows(y))
