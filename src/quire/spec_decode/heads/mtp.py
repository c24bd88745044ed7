"""Multi-token prediction as in DeepSeek-V3 (arXiv:2412.19437): one more layer, in the target's own checkpoint or in a
file of its own (the speculators library's layout).

The same layer is applied again on its own output to draft more than one token.
"""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from quire.devices.graph import Graph, Recorder, record
from quire.devices.ops import Embed, Linear, Receive, SelectRows, Tap, Value
from quire.devices.protocol import Backend, KVSpec, Matrix
from quire.errors import ModelError
from quire.model.expand import decoder_config
from quire.model.load import open_tensors
from quire.model.loaded import LoadedModel
from quire.model.parts.layer import Layer
from quire.model.parts.norm import Norm
from quire.model.parts.recording import Recording
from quire.model.shard import WHOLE
from quire.spec_decode.head import Head, HeadSource, Named
from quire.spec_decode.heads.layer import layer_spec, own_layers, published_tokens


def read_mtp(backend: Backend, target: LoadedModel, outline: bool) -> Head:
    """Read the layer. ModelError: the target's files have none."""
    path, spec = target.info.directory, target.spec
    config, checkpoint, names = open_tensors(path)
    source = HeadSource.over(path, config, checkpoint, backend, target, outline)
    last, width, eps = spec.num_layers, spec.hidden_size, spec.layers[-1].norm.eps
    prefix = names.layer.format(i=last)
    if not source.has(f"{prefix}eh_proj.weight"):
        raise ModelError(
            f"{path}: there is no layer that predicts further tokens ({prefix}eh_proj.weight): choose another method"
        )
    one = replace(spec, layers=spec.layers[-1:])  # it is like the target's last layer
    layer = Layer(one.layers[0], Named.of(source, spec, names), f"layers.{last}", (0, 1), WHOLE)
    graph = MTP(
        target,
        (
            source.norm(f"{prefix}enorm", width, eps),
            source.norm(f"{prefix}hnorm", width, eps),
        ),
        (
            source.matrix([f"{prefix}eh_proj.weight"], [width], 2 * width, lambda array: array[:, :width]),
            source.matrix([f"{prefix}eh_proj.weight"], [width], 2 * width, lambda array: array[:, width:]),
        ),
        layer,
        source.norm(f"{prefix}shared_head.norm", width, eps),
    )
    return _head(graph, target, one.kv_spec(target.dtype), 1, source.nbytes)


def read_mtp_file(source: HeadSource, target: LoadedModel) -> Head:
    """Read the layer, which has neither embedding nor head of its own. ModelError: it does not fit the target."""
    config, path, prefix, width = source.config, source.path, "mtp_layers.0.", target.spec.hidden_size
    spec = layer_spec(config.get("transformer_layer_config", config), path)
    if spec.hidden_size != width:
        raise ModelError(
            f"{path}: the layer is {spec.hidden_size} wide and its target {width}: use one made for the target"
        )

    def norm(name: str) -> Norm:
        return source.norm(f"{prefix}{name}", width, spec.norm_eps)

    def half(start: int) -> Matrix:
        name = f"{prefix}input_proj.weight"
        return source.matrix([name], [width], 2 * width, lambda array: array[:, start : start + width])

    own = decoder_config(spec)
    graph = MTP(
        target,
        (norm("token_layernorm"), norm("hidden_layernorm")),
        (half(0), half(width)),
        own_layers(source, own, prefix)[0],
        norm("final_layernorm"),
    )
    source.refuse_left(("embed_tokens", "lm_head", "verifier_", "rotary_emb"))
    return _head(graph, target, own.kv_spec(target.dtype), published_tokens(config, 1), source.nbytes)


def _head(graph: MTP, target: LoadedModel, kv_spec: KVSpec, num_tokens: int, nbytes: int) -> Head:
    spec = target.spec

    def made(feed: bool) -> Graph:
        hidden = partial(graph.hidden, feed=feed)
        return record(hidden, target.decoder.logits, spec.vocab_size, spec.hidden_size, range(1), (0,))

    return Head(
        first=made(True),
        again=made(False),
        kv_spec=kv_spec,
        taps=(spec.num_layers - 1,),
        num_tokens=num_tokens,
        weight_bytes=nbytes,
    )


class MTP:
    """The graph of the layer. With `feed` it starts from the target's last layer, else from its own output."""

    def __init__(
        self,
        target: LoadedModel,
        norms: tuple[Norm, Norm],
        projection: tuple[Matrix, Matrix],
        layer: Layer,
        norm: Norm,
    ) -> None:
        self._target_norm, self._embedding = target.decoder.norm, target.decoder.table
        self._width = target.spec.hidden_size
        self._norms, self._projection, self._layer, self._norm = norms, projection, layer, norm

    def hidden(self, g: Recorder, feed: bool) -> Value:
        x = g(Receive(self._width))
        if feed and self._target_norm is not None:
            x = self._target_norm(g, x)
        token = self._norms[0](g, g(Embed(self._embedding)))
        hidden = self._norms[1](g, x)
        u = g(Linear(hidden, self._projection[1], residual=g(Linear(token, self._projection[0]))))
        y = self._norm(g, self._layer(Recording(g), u))
        g(Tap(y))
        return g(SelectRows(y))
