"""Family: the record of a model family. Readers of the fields that all decoders share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.devices.protocol import Activation, Routing
from quire.model.families.config import ConfigReader
from quire.model.families.names import LLAMA_NAMES, TensorNames
from quire.model.families.rope import PARTIAL, context_length, read_rope, rotary_dim
from quire.model.parts.bounds import MAX_LAYERS
from quire.model.parts.decoder import DecoderConfig
from quire.model.tree import make_decoder, mixture_fields

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
FULL, SLIDING = "full_attention", "sliding_attention"
DENSE, SPARSE = "dense", "sparse"


Names = TensorNames | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: which models have it, how its config is read, and where its tensors are.

    `read` turns a config into a model's. `names` may be what differs from Llama's (TensorNames.changed), and may depend
    on the model. `defaults` are the values that transformers' config class gives to absent keys; a key without one is
    required, or means what llama's means. `spellings` are the names that a key has in the file if not its own. `unused`
    are keys that the class has and the model does not use. `further` layers after the last predict further tokens, and
    are left out. `quantized` maps methods of quantization that only change where tensors are, and how, to that change.
    """

    models: str
    read: Callable[[ConfigReader], DecoderConfig]
    names: Names | Callable[[DecoderConfig, ConfigReader], TensorNames] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    spellings: Mapping[str, str] = field(default_factory=dict)
    unused: str = ""
    further: int = 0
    quantized: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def tensor_names(self, model: DecoderConfig, config: ConfigReader) -> TensorNames:
        found = self.names(model, config) if callable(self.names) else self.names
        names = found if isinstance(found, TensorNames) else LLAMA_NAMES.changed(found)
        return names.without_layers(model.num_layers, self.further)


def read_decoder(config: ConfigReader, **fields: Any) -> DecoderConfig:
    """Read a decoder from the keys that all have; the family sets other `fields` of its parts (make_decoder).

    Sizes may be lists, one for each layer. `rotated` is how many elements of a head are rotated (0: none, and there is
    no rope). `layer_ropes` has the rope of each layer in place of `rope`, which only the layers that are `turned` have.
    """
    layers, hidden = fields.pop("num_layers", None) or num_layers(config), config.integer("hidden_size")
    heads = fields.pop("num_heads", None) or config.integer("num_attention_heads")
    kv_heads = fields.pop("num_kv_heads", None) or config.optional_integer("num_key_value_heads") or heads
    if not isinstance(heads, list) and not isinstance(kv_heads, list) and heads % kv_heads:
        raise config.wrong("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
    head_dim = fields.pop("head_dim", None) or head_size(config)
    longest = max(head_dim) if isinstance(head_dim, list) else head_dim
    rotated = fields.pop("rotated", None)
    if rotated is None and longest % 2:
        raise config.wrong("head_dim", longest, "even, for rotary embedding")
    if rotated is None and "rope" not in fields and rotary_dim(config, longest) != longest:
        raise config.wrong(PARTIAL, config.get(PARTIAL), "1.0")
    rotated = longest if rotated is None else rotated
    max_position = fields.pop("max_position", None) or config.integer("max_position_embeddings")
    rope = fields.pop("rope", None)
    if rotated and rope is None:
        rope = read_rope(config, rotated, max_position)
    turned, ropes = fields.pop("turned", None), fields.pop("layer_ropes", rope)
    inner, moe = fields.pop("intermediate_size", None), fields.get("moe")
    if inner is None:  # no layer may use it
        absent = moe["intermediate_size"] if moe is not None and all(moe["layers"]) else None
        inner = config.integer("intermediate_size", absent)
    if "norm_eps" not in fields:
        fields["norm_eps"] = config.number("rms_norm_eps", 1e-6)
    given = {
        "vocab_size": config.integer("vocab_size"),
        "activation": fields["activation"] if "activation" in fields else read_activation(config),
        "norm_kind": "rms",
        "attention_num_heads": heads,
        "attention_num_kv_heads": kv_heads,
        "attention_head_dim": head_dim,
        "attention_rope": ropes if turned is None else [rope if turn else None for turn in turned],
        "scores_scale": longest**-0.5,
        "mlp_intermediate_size": inner,
        "head_tied": config.boolean("tie_word_embeddings", False),
        **fields,
    }
    positions = context_length(rope, max_position)
    return make_decoder(
        architecture_of(config), hidden_size=hidden, num_layers=layers, max_position=positions, **given
    )


def architecture_of(config: ConfigReader) -> str:
    """Return the class that the config names; the registry has checked it."""
    names = config.get("architectures")
    return str(names[0])


def num_layers(config: ConfigReader) -> int:
    return config.integer("num_hidden_layers", high=MAX_LAYERS)


def head_size(config: ConfigReader) -> int:
    """Read head_dim, or compute the hidden size's share of a head."""
    given = config.optional_integer("head_dim")
    return given or max(1, config.integer("hidden_size") // config.integer("num_attention_heads"))


def read_activation(config: ConfigReader, key: str = "hidden_act") -> Activation:
    name = config.get(key) if config.given(key) else config.get(key) or "silu"
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise config.wrong(key, name, f"one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def biases(config: ConfigReader, key: str = "attention_bias", default: bool = False) -> dict[str, bool]:
    """Read one key for the biases of all four projections of attention."""
    bias = config.boolean(key, default)
    return {"attention_qkv_bias": bias, "attention_out_bias": bias}


def alternate(layers: int, pattern: int, offset: int = 1) -> list[str]:
    """List kinds of layers: every pattern-th sees all positions, the others slide."""
    return [FULL if (i + offset) % pattern == 0 else SLIDING for i in range(layers)]


def read_list(
    config: ConfigReader, key: str, default: Sequence[Any], fits: Callable[[Any], bool], must: str
) -> list[Any]:
    """Read a list as long as `default`, or take that where the key is absent or null; all its entries fit."""
    found = config.get(key)
    if found is None:
        return list(default)
    if not isinstance(found, list) or len(found) != len(default) or not all(map(fits, found)):
        raise config.wrong(key, found, f"{len(default)} {must}")
    return found


def layer_kinds(
    config: ConfigReader,
    default: Sequence[Any],
    kinds: Sequence[Any] = (FULL, SLIDING),
    key: str = "layer_types",
) -> list[str]:
    """Read the kind of each layer, or take the family's own where the key is absent or null."""
    must = f"entries, each one of {', '.join(map(str, kinds))}"
    return read_list(config, key, default, lambda kind: kind in kinds, must)


def listed_layers(config: ConfigReader, key: str, default: Sequence[int]) -> list[int]:
    """Read a list of layers by number, or take the family's own where the key is absent or null."""
    layers, found = num_layers(config), config.get(key)
    if found is None:
        return list(default)
    if not isinstance(found, list) or any(type(i) is not int or not 0 <= i < layers for i in found):
        raise config.wrong(key, found, f"a list of layers from 0 to {layers - 1}")
    return found


def windows_of(config: ConfigReader, kinds: Sequence[str]) -> list[int | None]:
    """Read the window of each layer by its kind; the key is required if a layer slides."""
    window = config.optional_integer("sliding_window", low=0)
    if SLIDING in kinds and not window:
        raise config.wrong("sliding_window", window, f"an integer >= 1 where layer_types has {SLIDING}")
    return [window if kind == SLIDING else None for kind in kinds]


def read_moe(
    config: ConfigReader,
    *,
    layers: Sequence[bool] | None = None,
    experts: str = "num_experts",
    inner: str = "moe_intermediate_size",
    **fields: Any,
) -> dict[str, Any]:
    """Read a mixture of experts in the layers where `layers` is true (None: in all).

    `experts` and `inner` are the keys of their number and size. `fields` are as in mixture_fields; top_k, and groups if
    the config has them, are read.
    """
    count, own = config.integer(experts), [True] * num_layers(config) if layers is None else list(layers)
    if "num_groups" not in fields and config.known("n_group"):
        fields |= {"num_groups": config.integer("n_group"), "top_groups": config.integer("topk_group")}
    top_k = config.integer("num_experts_per_tok", high=count)
    made = mixture_fields(count, top_k, config.integer(inner), own, **fields)
    chosen: Routing = made["routing"]
    number, kept = chosen.num_groups, chosen.top_groups
    if count % number or kept > number or chosen.top_k > kept * (count // number):
        raise config.wrong(
            "n_group", number, f"equal groups of {count} experts, {kept} of which hold {chosen.top_k}"
        )
    return made


def sparse_after(
    config: ConfigReader, key: str = "first_k_dense_replace", default: int = 0, prevails: bool = False
) -> list[bool]:
    """List the mixture's layers: the first ones, by the key's number, are dense; mlp_layer_types may tell by layer.

    Without a `key` the number is `default`. `prevails`: a class that has both goes by mlp_layer_types.
    """
    layers, first = num_layers(config), config.count(key, default)
    said = [SPARSE if i >= first else DENSE for i in range(layers)]
    kinds = layer_kinds(config, said, (DENSE, SPARSE), "mlp_layer_types")
    if config.given(key) and kinds != said and not prevails:
        raise config.wrong("mlp_layer_types", kinds, f"dense in the first {first} layers, as {key} says")
    return [kind == SPARSE for kind in kinds]
