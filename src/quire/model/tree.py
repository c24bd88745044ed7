"""Makes the tree of a model's configs from fields that are named after the parts that have them.

`attention_clip=8.0` sets the field `clip` of attention in each layer, `scores_window=[64, None]` the window of each
layer's scores: a list has a value for each layer. Fields of layers themselves have no prefix. A norm that is True is
the model's own. So a new field of a part needs no place but the part, and the families that have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire.devices.protocol import Routing
from quire.errors import ModelError
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.embedding import EmbeddingConfig, HeadConfig, PositionsConfig
from quire.model.parts.layer import LayerConfig
from quire.model.parts.norm import HeadNormConfig, NormConfig
from quire.model.parts.part import FeedForward, LayerAdditions, Mixer, ModelAdditions, config_class
from quire.model.parts.scores import ScoresConfig

PARTS = ("norm", "qk", "attention", "scores", "mlp", "embedding", "positions", "head", "added", "layer")
NORMS = ("norm", "value_norm", "out_norm", "down_norm", "beside")  # fields that hold a norm
Fields = Mapping[str, Any]
Kinds = str | Sequence[str | None] | None


def make_decoder(
    architecture: str,
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    max_position: int,
    activation: str,
    kinds: Kinds = "attention",
    mixers: Mapping[str, Fields] | None = None,
    moe: Fields | None = None,
    bidirectional: bool = False,
    final_norm: bool = True,
    headless: bool = False,
    additions: ModelAdditions | None = None,
    **fields: Any,
) -> DecoderConfig:
    """Make the config of a model.

    `kinds` says what mixes tokens, by layer or in all: attention, a kind of which `mixers` has the fields, or None;
    `second` is the kind of a mixer beside it.
    `moe` has the fields of a mixture in place of the MLP in the layers where its `layers` are true, or with `with_mlp`
    beside it. A layer whose attention_num_heads are 0 has no attention, one whose mlp_intermediate_size is 0 no MLP.
    ModelError: a list has another length than the model.
    """
    own = [kinds] * num_layers if kinds is None or isinstance(kinds, str) else list(kinds)
    sizes = hidden_size, num_layers, max_position
    about = _About({"kind": own, **fields}, mixers or {}, sizes, activation, bidirectional)
    norm, head, positions = about.norm, about.at("head"), None
    if offset := about.at("positions"):
        positions = PositionsConfig(rows=max_position + offset["offset"], **offset)
    embedding = {"width": hidden_size, **about.at("embedding")}
    added = {name: value for name, value in about.at("added").items() if name != "laurel"}
    return DecoderConfig(
        architecture=architecture,
        max_position=max_position,
        embedding=EmbeddingConfig(vocab_size, hidden_size, positions=positions, **embedding),
        layers=tuple(about.layers(num_layers, moe)),
        norm=norm if final_norm else None,
        head=None if headless else HeadConfig(**head),
        bidirectional=bidirectional,
        additions=config_class("streams")(**added) if added else additions,
    )


def mixture_fields(
    experts: int,
    top_k: int,
    inner: int,
    layers: list[bool],
    shared: int = 0,
    beside: bool = False,
    **fields: Any,
) -> dict[str, Any]:
    """Make the fields of a mixture; those of `fields` that Routing has are its routing's.

    `inner` and `shared` are the sizes of an expert and of the shared one. With `beside` an MLP works beside it.
    """
    routing = {name: fields.pop(name) for name in Routing.__struct_fields__ if name in fields}
    return {
        "routing": Routing(experts, top_k, shared=bool(shared), **routing),
        "intermediate_size": inner,
        "layers": layers,
        "shared_intermediate_size": shared,
        **({"norm": True, "beside": True, "with_mlp": True} if beside else {}),
        **fields,
    }


class _About:
    """The fields of a model by part, and the sizes that several parts have: its width, layers and positions."""

    def __init__(
        self,
        fields: Fields,
        mixers: Mapping[str, Fields],
        sizes: tuple[int, int, int],
        activation: str,
        whole: bool,
    ) -> None:
        self._mixers, self._activation, self._whole = mixers, activation, whole
        self._hidden, layers, self._positions = sizes
        self._parts: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
        for name, value in fields.items():
            if isinstance(value, list) and len(value) != layers:
                raise ModelError(f"{name} has {len(value)} entries for {layers} layers")
            part, _, field = name.partition("_")
            part, field = (part, field) if part in PARTS and field else ("layer", name)
            self._parts[part][field] = value
        self.norm = NormConfig(**self._parts["norm"])

    def at(self, part: str, i: int = 0) -> dict[str, Any]:
        """Give the fields of a part in layer `i`, or of one that the model has once."""
        return self._resolved(self._parts[part], i)

    def layers(self, count: int, moe: Fields | None) -> Iterator[LayerConfig]:
        """Yield the layers; those whose fields are equal are one object."""
        parts = (*self._parts.values(), *self._mixers.values(), moe or {})
        lists = [value for part in parts for value in part.values() if isinstance(value, list)]
        made: dict[tuple[Any, ...], LayerConfig] = {}
        for i in range(count):
            key = tuple(values[i] for values in lists)
            if key not in made:
                made[key] = self._layer(i, moe)
            yield made[key]

    def _layer(self, i: int, moe: Fields | None) -> LayerConfig:
        fields = self.at("layer", i)
        additions: LayerAdditions | None = fields.pop("additions", None)
        if added := self.at("added", i):
            additions = config_class("gemma3n")(self.norm, self._activation, **added)
        mixer, mlp = self._mixer(fields.pop("kind"), i), self._mlp(i, moe)
        second = self._mixer(fields.pop("second", None), i)
        return LayerConfig(self._hidden, self.norm, mixer, mlp, second, additions=additions, **fields)

    def _mixer(self, kind: str | None, i: int) -> Mixer | None:
        if kind is None or kind == "attention":
            return None if kind is None else self._attention(i)
        fields = self._resolved(self._mixers[kind], i)
        if kind == "latent":
            own = self.at("attention", i)
            heads = own["num_heads"]
            about = {"num_heads": heads, "scores": self._scores(i, heads), "rope": own["rope"]}
            fields = {**about, "out_bias": own.get("out_bias", False), **fields}
        made: Mixer = config_class(kind)(hidden_size=self._hidden, **fields)
        return made

    def _scores(self, i: int, heads: int) -> ScoresConfig:
        fields = self.at("scores", i)
        if self._whole:
            fields["ahead"] = (fields.get("window") or self._positions) - 1
        return ScoresConfig(heads, **fields)

    def _attention(self, i: int) -> Mixer | None:
        fields, norm = self.at("attention", i), self.norm
        if not fields["num_heads"]:
            return None
        qk = {name.removeprefix("norm_"): value for name, value in self.at("qk", i).items()}
        over, after = qk.pop("norm", None), qk.pop("after_rope", False)
        if over is not None:
            own = {"kind": norm.kind, "eps": norm.eps, **qk}
            fields["qk_norm"] = HeadNormConfig(NormConfig(**own), over, after)
        scores = self._scores(i, fields["num_heads"])
        made: Mixer = config_class("attention")(
            hidden_size=self._hidden, scores=scores, positions=self._positions, **fields
        )
        return made

    def _mlp(self, i: int, moe: Fields | None) -> FeedForward | None:
        about, mixture = {"hidden_size": self._hidden, "activation": self._activation}, None
        if moe is not None:
            mixture = self._resolved(moe, i)
            layers, beside = mixture.pop("layers"), mixture.pop("with_mlp", False)
            mixture = mixture if layers else None
        mlp: FeedForward | None = None
        if (mixture is None or beside) and (fields := self.at("mlp", i))["intermediate_size"]:
            mlp = config_class("mlp")(**about, **fields)
        if mixture is None:
            return mlp
        made: FeedForward = config_class("mixture")(**about, dense=mlp, **mixture)
        return made

    def _resolved(self, fields: Fields, i: int) -> dict[str, Any]:
        """Take the values of layer `i`."""
        own = {name: value[i] if isinstance(value, list) else value for name, value in fields.items()}
        norms: Sequence[str] = [name for name in NORMS if isinstance(own.get(name), bool)]
        return own | {name: self.norm if own[name] else None for name in norms}
