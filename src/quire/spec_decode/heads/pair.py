"""Heads of one layer over pairs: the target's last state at a position, and the embedding of the token after it.

EAGLE-1 and 2 (Li et al. 2024, arXiv:2401.15077, 2406.16858; HASS has the same files), and multi-token prediction as in
DeepSeek-V3 (arXiv:2412.19437), in the target's own checkpoint or in a file of its own (the speculators library's
layout). Nemotron's is two layers, an attention and a mixture. They are applied again on their own output to draft more
than one token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from quire.devices.graph import Recorder, record
from quire.devices.ops import Embed, Linear, Receive, SelectRows, Tap, Value
from quire.devices.protocol import Backend, FloatArray, KVSpec, Matrix
from quire.errors import ModelError
from quire.model.further import find_further
from quire.model.load import open_tensors
from quire.model.loaded import LoadedModel
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.layer import Layer
from quire.model.parts.norm import Norm
from quire.model.parts.source import Recording
from quire.model.shard import WHOLE
from quire.spec_decode.head import Head, HeadSource, Named
from quire.spec_decode.heads.layer import layer_spec, own_layers, published_tokens


def read_eagle(source: HeadSource, target: LoadedModel) -> Head:
    """Read the head. ModelError: it does not fit the target."""
    width, embedding = target.spec.hidden_size, target.decoder.table
    config = _spec(source, source.config, width)
    config = replace(config, layers=(replace(config.layers[0], bare=True),))
    if source.has("embed_tokens.weight"):
        embedding = source.matrix(["embed_tokens.weight"], [target.spec.vocab_size], width, use="table")
    graph = PairLayer(
        target,
        embedding,
        source.halves(["fc.weight"], [width], width),
        own_layers(source, config),
        bias=source.vector("fc.bias", width) if source.has("fc.bias") else None,
    )
    source.refuse_left(("rotary_emb", "lm_head", "embed_tokens"))
    return graph.head(config.kv_spec(target.dtype), source)


def read_mtp(backend: Backend, target: LoadedModel, outline: bool) -> Head:
    """Read the layers. ModelError: the target's files have none."""
    path, spec = target.info.directory, target.spec
    config, checkpoint, names = open_tensors(path)
    source = HeadSource(path, config, checkpoint, backend, target, outline)
    found = find_further(spec, names, checkpoint)
    own, join, first = found.config, f"{found.join}.weight", found.first
    if not source.has(join):
        raise ModelError(
            f"{path}: there is no layer that predicts further tokens ({join}): choose another method"
        )

    def norm(name: str) -> Norm:
        return source.norm(name, spec.hidden_size, own.layers[-1].norm.eps, offset=names.norm_offset)

    weights, count = Named.of(source, own, found.names), own.num_layers
    graph = PairLayer(
        target,
        target.decoder.table,
        source.halves([join], [spec.hidden_size], spec.hidden_size),
        [Layer(own.layers[i], weights, f"layers.{first + i}", (i, count), WHOLE) for i in range(count)],
        (norm(found.token_norm), norm(found.hidden_norm)),
        norm(found.norm),
        further=own.further(range(count)),
    )
    return graph.head(own.kv_spec(target.dtype), source, 1)


def read_mtp_file(source: HeadSource, target: LoadedModel) -> Head:
    """Read the layer, which has neither embedding nor head of its own. ModelError: it does not fit the target."""
    config, prefix, width = source.config, "mtp_layers.0.", target.spec.hidden_size
    spec = _spec(source, config.get("transformer_layer_config", config), width)

    def norm(name: str) -> Norm:
        return source.norm(f"{prefix}{name}", width, spec.layers[0].norm.eps)

    graph = PairLayer(
        target,
        target.decoder.table,
        source.halves([f"{prefix}input_proj.weight"], [width], width),
        own_layers(source, spec, prefix)[:1],
        (norm("token_layernorm"), norm("hidden_layernorm")),
        norm("final_layernorm"),
    )
    source.refuse_left(("embed_tokens", "lm_head", "verifier_", "rotary_emb"))
    return graph.head(spec.kv_spec(target.dtype), source, published_tokens(config, 1))


def _spec(source: HeadSource, config: dict[str, object], width: int) -> DecoderConfig:
    spec = layer_spec(config, source.path)
    if spec.hidden_size != width:
        raise ModelError(
            f"{source.path}: the head is {spec.hidden_size} wide and its target {width}: use a head made for the target"
        )
    return spec


@dataclass(frozen=True, slots=True)
class PairLayer:
    """The graph of the layers. `halves` project the token's part and the hidden state's, each after its norm."""

    target: LoadedModel
    embedding: Matrix
    halves: tuple[Matrix, Matrix]
    layers: Sequence[Layer]
    norms: tuple[Norm | None, Norm | None] = (None, None)
    norm: Norm | None = None
    bias: FloatArray | None = None
    further: Mapping[int, range] = field(default_factory=dict)

    def hidden(self, g: Recorder, feed: bool) -> Value:
        """Record the layers. With `feed` it starts from the target's last layer, else from its own output."""

        def normed(norm: Norm | None, x: Value) -> Value:
            return x if norm is None else norm(g, x)

        x = g(Receive(self.target.spec.hidden_size))
        if feed:
            x = normed(self.target.decoder.norm, x)
        token = normed(self.norms[0], g(Embed(self.embedding)))
        hidden = normed(self.norms[1], x)
        u = g(Linear(hidden, self.halves[1], residual=g(Linear(token, self.halves[0], self.bias))))
        r = Recording(g, further=self.further)
        for layer in self.layers:
            u = layer(r, u)
        y = normed(self.norm, u)
        g(Tap(y))
        return g(SelectRows(y))

    def head(self, kv_spec: KVSpec, source: HeadSource, num_tokens: int = 3) -> Head:
        """Make the head, which drafts `num_tokens` tokens unless told otherwise."""
        spec, logits = self.target.spec, self.target.decoder.logits
        first, again = (
            record(partial(self.hidden, feed=feed), logits, spec.vocab_size, spec.hidden_size, range(1), (0,))
            for feed in (True, False)
        )
        taps = (spec.num_layers - 1,)
        return Head(
            first, again, kv_spec=kv_spec, taps=taps, num_tokens=num_tokens, weight_bytes=source.nbytes
        )
