"""Multi-token prediction as in DeepSeek-V3 (arXiv:2412.19437): one more layer, in the target's own checkpoint or in a
file of its own (the speculators library's layout).

The same layer is applied again on its own output to draft more than one token.
"""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from quire.devices.graph import Graph, Recorder, record
from quire.devices.ops import Embed, Linear, Normalize, Receive, RopeAngles, SelectRows, Tap, Value
from quire.devices.protocol import Backend, KVSpec, Matrix, Norm
from quire.errors import ModelError
from quire.model.assemble import Assembly
from quire.model.decoder import Layers
from quire.model.load import open_tensors
from quire.model.loaded import LoadedModel
from quire.model.rope import make_rope
from quire.model.spec import ArchSpec
from quire.model.weights import LayerWeights
from quire.spec_decode.head import Head, HeadSource
from quire.spec_decode.heads.layer import layer_spec, plain_layer, published_tokens


def read_mtp(backend: Backend, target: LoadedModel, outline: bool) -> Head:
    """ModelError: the target's files have no such layer."""
    path, spec = target.info.directory, target.spec
    config, checkpoint, names = open_tensors(path)
    source = HeadSource.over(path, config, checkpoint, backend, target, outline)
    last, width = spec.num_layers, spec.hidden_size
    prefix = names.layer.format(i=last)
    if not source.has(f"{prefix}eh_proj.weight"):
        raise ModelError(
            f"{path}: there is no layer that predicts further tokens ({prefix}eh_proj.weight): choose another method"
        )
    longer = one_layer(spec, last)
    layer = Assembly(longer, names, source.packer).layer(last)
    single = one_layer(spec, 0)
    graph = MTP(
        single,
        target,
        (
            source.norm(f"{prefix}enorm", width, spec.norm_eps),
            source.norm(f"{prefix}hnorm", width, spec.norm_eps),
        ),
        (
            source.matrix([f"{prefix}eh_proj.weight"], [width], 2 * width, lambda array: array[:, :width]),
            source.matrix([f"{prefix}eh_proj.weight"], [width], 2 * width, lambda array: array[:, width:]),
        ),
        layer,
        source.norm(f"{prefix}shared_head.norm", width, spec.norm_eps),
    )
    return _head(graph, target, single.kv_spec(target.dtype), 1, source.nbytes + layer_bytes(layer))


def read_mtp_file(source: HeadSource, target: LoadedModel) -> Head:
    """ModelError: the layer does not fit the target. It has neither an embedding nor a head of its own."""
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

    graph = MTP(
        spec,
        target,
        (norm("token_layernorm"), norm("hidden_layernorm")),
        (half(0), half(width)),
        plain_layer(source, spec, 0, prefix),
        norm("final_layernorm"),
    )
    source.refuse_left(("embed_tokens", "lm_head", "verifier_", "rotary_emb"))
    return _head(graph, target, spec.kv_spec(target.dtype), published_tokens(config, 1), source.nbytes)


def _head(graph: MTP, target: LoadedModel, kv_spec: KVSpec, num_tokens: int, nbytes: int) -> Head:
    spec = target.spec

    def made(feed: bool) -> Graph:
        hidden = partial(graph.hidden, feed=feed)
        return record(hidden, graph.head, spec.vocab_size, spec.hidden_size, range(1), (0,))

    return Head(
        first=made(True),
        again=made(False),
        kv_spec=kv_spec,
        taps=(spec.num_layers - 1,),
        num_tokens=num_tokens,
        weight_bytes=nbytes,
    )


def one_layer(spec: ArchSpec, index: int) -> ArchSpec:
    """`spec` with layers up to `index`, of which that one is like the target's last layer."""

    def extended(each: tuple[object, ...] | None) -> tuple[object, ...] | None:
        return None if each is None else (*each[:index], each[-1])

    moe = spec.moe
    return replace(
        spec,
        num_layers=index + 1,
        windows=extended(spec.windows),
        layer_ropes=extended(spec.layer_ropes),
        chunks=extended(spec.chunks),
        moe=None if moe is None else replace(moe, layers=extended(moe.layers)),
    )


def layer_bytes(layer: LayerWeights) -> int:
    """What the matrices of a layer take."""
    found: dict[int, int] = {}

    def count(value: object) -> None:
        if hasattr(value, "nbytes") and hasattr(value, "greedy_nbytes"):
            found[id(value)] = value.nbytes
        elif isinstance(value, tuple):
            for each in value:
                count(each)
        elif hasattr(value, "__struct_fields__"):
            for name in value.__struct_fields__:
                count(getattr(value, name))

    count(layer)
    return sum(found.values())


class MTP:
    """The graph of the layer. With `feed` it starts from the target's last layer, else from its own output."""

    def __init__(
        self,
        spec: ArchSpec,
        target: LoadedModel,
        norms: tuple[Norm, Norm],
        projection: tuple[Matrix, Matrix],
        layer: LayerWeights,
        norm: Norm,
    ) -> None:
        self.spec, self.head = spec, target.decoder.head
        self._target_norm, self._embedding = target.weights.norm, target.weights.table
        self._norms, self._projection, self._layer, self._norm = norms, projection, layer, norm
        self._layers = Layers(spec)

    def hidden(self, g: Recorder, feed: bool) -> Value:
        x = g(Receive(self.spec.hidden_size))
        if feed and self._target_norm is not None:
            x = g(Normalize(x, self._target_norm))
        token = g(Normalize(g(Embed(self._embedding)), self._norms[0]))
        hidden = g(Normalize(x, self._norms[1]))
        u = g(Linear(hidden, self._projection[1], residual=g(Linear(token, self._projection[0]))))
        rope = self.spec.rope_of(0)
        angles = {} if rope is None else {rope: g(RopeAngles(make_rope(rope)))}
        y = g(Normalize(self._layers.layer(g, u, angles, 0, 0, self._layer), self._norm))
        g(Tap(y))
        return g(SelectRows(y))
