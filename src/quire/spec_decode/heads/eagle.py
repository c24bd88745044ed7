"""EAGLE-1 and 2 (Li et al. 2024, arXiv:2401.15077, 2406.16858): a layer over the token's embedding and the final hidden
state of the target; the target's own head. HASS has the same files.
"""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from quire.devices.graph import Graph, Recorder, record
from quire.devices.ops import Embed, Linear, Receive, SelectRows, Tap, Value
from quire.devices.protocol import FloatArray, Matrix
from quire.errors import ModelError
from quire.model.expand import decoder_config
from quire.model.loaded import LoadedModel
from quire.model.parts.layer import Layer
from quire.model.parts.recording import Recording
from quire.spec_decode.head import Head, HeadSource
from quire.spec_decode.heads.layer import layer_spec, own_layers


def read_eagle(source: HeadSource, target: LoadedModel) -> Head:
    """Read the head. ModelError: it does not fit the target."""
    spec, width, vocab = (
        layer_spec(source.config, source.path),
        target.spec.hidden_size,
        target.spec.vocab_size,
    )
    if spec.hidden_size != width:
        raise ModelError(
            f"{source.path}: the head is {spec.hidden_size} wide and its target {width}: use a head made for the target"
        )
    embedding = target.decoder.table
    if source.has("embed_tokens.weight"):
        embedding = source.matrix(["embed_tokens.weight"], [vocab], width, use="table")
    token_half = source.matrix(["fc.weight"], [width], 2 * width, lambda array: array[:, :width])
    hidden_half = source.matrix(["fc.weight"], [width], 2 * width, lambda array: array[:, width:])
    bias = source.vector("fc.bias", width) if source.has("fc.bias") else None
    config = decoder_config(spec)
    config = replace(config, layers=(replace(config.layers[0], bare=True),))
    graph = Eagle(target, embedding, (token_half, hidden_half), bias, own_layers(source, config)[0])
    source.refuse_left(("rotary_emb", "lm_head", "embed_tokens"))

    def made(feed: bool) -> Graph:
        hidden = partial(graph.hidden, feed=feed)
        return record(hidden, target.decoder.logits, vocab, width, range(1), (0,))

    return Head(
        first=made(True),
        again=made(False),
        kv_spec=config.kv_spec(target.dtype),
        taps=(target.spec.num_layers - 1,),
        weight_bytes=source.nbytes,
    )


class Eagle:
    """The graph of a head. With `feed` it starts from the target's last layer, else from its own output."""

    def __init__(
        self,
        target: LoadedModel,
        embedding: Matrix,
        fc: tuple[Matrix, Matrix],
        fc_bias: FloatArray | None,
        layer: Layer,
    ) -> None:
        self._width, self._norm = target.spec.hidden_size, target.decoder.norm
        self._embedding, self._fc, self._fc_bias, self._layer = embedding, fc, fc_bias, layer

    def hidden(self, g: Recorder, feed: bool) -> Value:
        x = g(Receive(self._width))
        if feed and self._norm is not None:
            x = self._norm(g, x)
        token = g(Linear(g(Embed(self._embedding)), self._fc[0], self._fc_bias))
        z = g(Linear(x, self._fc[1], residual=token))
        y = self._layer(Recording(g), z)
        g(Tap(y))
        return g(SelectRows(y))
