"""The metadata of a GGUF file as the config.json that its model came with. Knows keys; families know the maths.

A key of the architecture that nobody reads and that is not known to be harmless is refused, as in config.json.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from quire.errors import ModelError
from quire.weights.gguf.kinds import PLAIN
from quire.weights.gguf.parts import GGUFParts

HARMLESS = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.causal", "pooling_type")
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0, 1),
    "rope.scale_linear": (0, 1),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
}
GATING = {1: "softmax", 2: "sigmoid", 3: "softmax of the chosen"}  # gguf.ExpertGatingFuncType
FULL, SLIDING = "full_attention", "sliding_attention"
Config = dict[str, Any]


class Keys:
    """The keys of the file's own architecture, without its name before them; remembers which were read."""

    def __init__(self, file: GGUFParts) -> None:
        architecture = file.get("general.architecture")
        if not isinstance(architecture, str):
            raise ModelError(f"{file.path}: general.architecture is missing; the file holds no model")
        self.file, self.architecture = file, architecture
        self._prefix = f"{architecture}."
        self._unread = set(file.keys_under(self._prefix))

    def get(self, name: str) -> Any:
        """The value, None where absent. A float32 comes with the digits it was written with."""
        key = self._prefix + name
        self._unread.discard(key)
        value = self.file.get(key)
        if self.file.first.is_single(key):
            return float(str(np.float32(value)))
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        """A number that may be given for each layer, if all are the same."""
        value = self.get(name)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value < 1 << 31:
            raise self.wrong(name, "an integer above 0, the same for all layers", value)
        return value

    def by_layer(self, name: str, default: int | None = None, low: int = 1) -> list[int]:
        """An integer for each layer, given as such or once for all."""
        value, layers = self.get(name), num_layers(self)
        value = default if value is None else value
        values: list[Any] = value[:layers] if isinstance(value, list) else [value] * layers
        if len(values) != layers or any(type(x) is not int or not low <= x < 1 << 31 for x in values):
            raise self.wrong(name, f"an integer from {low}, or one for each layer", value)
        return values

    def numbers(self, key: str) -> list[float]:
        """A finite number for each layer, or one for all, under a key without the architecture's name."""
        value, layers = self.file.get(key), num_layers(self)
        values = value[:layers] if isinstance(value, list) else [value] * layers
        if len(values) != layers or any(type(x) is not float or not math.isfinite(x) for x in values):
            raise ModelError(
                f"{self.file.path}: {key} must be a number for each layer, got {str(value)[:80]}"
            )
        return values

    def count(self, name: str) -> int:
        """An integer of 0 or more; 0 where absent."""
        return 0 if not self.get(name) else self.integer(name)

    def scoring(self, must: str, renormalize: bool | None = None) -> None:
        """Refuse experts that are scored in another way than the architecture's."""
        value, norm = self.get("expert_gating_func"), self.get("expert_weights_norm")
        if value not in (None, 0) and GATING.get(value) != must:
            raise self.wrong("expert_gating_func", f"{must} ({GATING})", value)
        if renormalize is not None and norm not in (None, renormalize):
            raise self.wrong("expert_weights_norm", str(renormalize).lower(), norm)

    def optional_integer(self, name: str) -> int | None:
        return None if self.get(name) is None else self.integer(name)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.wrong(name, "a finite number", value)
        return float(value)

    def wrong(self, name: str, must: str, value: object) -> ModelError:
        return ModelError(f"{self.file.path}: {self._prefix}{name} must be {must}, got {str(value)[:80]}")

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def vector(self, tensor: str) -> list[float] | None:
        """A small tensor of float32 as a list; None where the file has none."""
        entry = self.file.tensors.get(tensor)
        if entry is None:
            return None
        if entry.kind.name != "F32" or len(entry.shape) != 1 or entry.shape[0] > 1 << 16:
            raise ModelError(f"{self.file.path}: tensor {tensor} must be a vector of F32")
        values = self.file.raw(tensor).view(PLAIN["F32"])
        if not ((values >= 1e-6) & (values <= 1e6)).all():
            raise ModelError(f"{self.file.path}: tensor {tensor} must hold factors from 1e-06 to 1000000.0")
        return [float(str(x)) for x in values]

    def finish(self) -> None:
        """Raise ModelError for keys that nobody read, unless harmless or at a neutral value."""
        for key in sorted(self._unread):
            name, value = key[len(self._prefix) :], self.file.get(key)
            if name not in HARMLESS and value not in NEUTRAL.get(name, ()):
                raise ModelError(
                    f"{self.file.path}: {key} = {str(value)[:80]} is not understood and may change results"
                )


def named(architecture: str, config: Config) -> Config:
    return {**config, "architectures": [architecture]}


def common(keys: Keys, alike: bool = True) -> Config:
    """What every model has. The embedding tells the size of the vocabulary, padding included.

    Without `alike` layers may differ in their heads: their number is the largest, and those of keys are left out.
    """
    embedding = keys.file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{keys.file.path}: no tensor token_embd.weight: the file holds no whole model")
    hidden, heads = keys.integer("embedding_length"), max(keys.by_layer("attention.head_count", low=0))
    config = {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": num_layers(keys),
        "num_attention_heads": heads,
        "max_position_embeddings": keys.integer("context_length"),
        "tie_word_embeddings": not keys.has("output.weight"),
    }
    if alike:
        keys.integer("attention.head_count")
        config["num_key_value_heads"] = keys.integer("attention.head_count_kv", heads)
    return config


def num_layers(keys: Keys) -> int:
    """Blocks after the last layer predict further tokens; the next one does not depend on them."""
    blocks, extra = keys.integer("block_count"), keys.count("nextn_predict_layers")
    if extra >= blocks:
        raise keys.wrong("nextn_predict_layers", f"below {blocks}, the number of blocks", extra)
    return blocks - extra


def llama_like(keys: Keys) -> Config:
    """Llama's shape: RMS norms, a gated MLP, rotary embedding."""
    config = common(keys) | head_dim(keys)
    return config | {
        "intermediate_size": keys.integer("feed_forward_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        **rope(keys, config["head_dim"]),
    }


def head_dim(keys: Keys) -> Config:
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    size = keys.integer("attention.key_length", max(1, hidden // heads))
    if keys.integer("attention.value_length", size) != size:
        raise keys.wrong("attention.value_length", f"{size}, as the keys", keys.get("attention.value_length"))
    return {"head_dim": size}


def partly_rotated(keys: Keys) -> Config:
    """Llama's shape for a family that by default rotates a part of each head: it is told the whole too."""
    return {"partial_rotary_factor": 1.0} | llama_like(keys)


def layer_types(keys: Keys, period: int) -> list[str]:
    """The kind of each layer: one flag a layer (true: it slides), or every `period`-th layer sees all positions."""
    blocks, given = keys.integer("block_count"), keys.get("attention.sliding_window_pattern")
    if isinstance(given, list):
        if len(given) != blocks or any(flag not in (0, 1) for flag in given):
            raise keys.wrong("attention.sliding_window_pattern", f"{blocks} flags", given)
        return [SLIDING if flag else FULL for flag in given[: num_layers(keys)]]
    if given is not None:
        period = keys.integer("attention.sliding_window_pattern")
    return [FULL if (i + 1) % period == 0 else SLIDING for i in range(num_layers(keys))]


def routed(keys: Keys, gating: str) -> Config:
    """Experts as DeepSeek's models count them, scored by `gating`."""
    keys.scoring(gating)
    return {
        "n_routed_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "n_shared_experts": _shared(keys),
        "first_k_dense_replace": keys.count("leading_dense_block_count"),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": bool(keys.get("expert_weights_norm")),
        "n_group": keys.integer("expert_group_count", 1),
        "topk_group": keys.integer("expert_group_used_count", 1),
    }


def _shared(keys: Keys) -> int:
    """The number of shared experts. Their size, where given, is that of as many routed ones."""
    shared, size = keys.count("expert_shared_count"), keys.get("expert_shared_feed_forward_length")
    if size and size != shared * keys.integer("expert_feed_forward_length"):
        raise keys.wrong("expert_shared_feed_forward_length", "expert_shared_count experts wide", size)
    return shared


def rope(keys: Keys, size: int, theta: float = 10000.0) -> Config:
    """`size` is the head's; fewer rotated dimensions are a partial rotary factor."""
    rotated = keys.integer("rope.dimension_count", size)
    config: Config = {
        "rope_theta": keys.number("rope.freq_base", theta),
        "rope_scaling": _scaling(keys, size),
    }
    if config["rope_scaling"] is None:
        config["rope_scaling"] = _llama3(keys, rotated, config["rope_theta"])
    if rotated != size:
        config["partial_rotary_factor"] = rotated / size
    return config


def _scaling(keys: Keys, size: int) -> Config | None:
    kind, factor = keys.get("rope.scaling.type"), keys.get("rope.scaling.factor")
    linear = keys.get("rope.scale_linear")
    long, short = keys.vector("rope_factors_long.weight"), keys.vector("rope_factors_short.weight")
    original, attention = (
        keys.optional_integer("rope.scaling.original_context_length"),
        keys.get("rope.scaling.attn_factor"),
    )
    if long is not None or short is not None:
        scaling: Config = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        if original is not None:
            scaling["original_max_position_embeddings"] = original
            scaling["factor"] = keys.integer("context_length") / original
        return scaling | ({} if attention is None else {"attention_factor": attention})
    if kind in (None, "none", "longrope"):
        return {"rope_type": "linear", "factor": linear} if linear not in (None, 0, 1) else None
    if kind == "linear":
        return None if factor == 1 else {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise keys.wrong("rope.scaling.type", "none, linear, yarn or longrope", kind)
    scaling = {"rope_type": "yarn", "factor": factor}
    optional = {"original_max_position_embeddings": original, "attention_factor": attention}
    for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        optional[name] = keys.get(f"rope.scaling.{key}")
    return scaling | {name: value for name, value in optional.items() if value is not None}


def _llama3(keys: Keys, size: int, theta: float) -> Config | None:
    """Llama 3.1's bands, found again from the factors that the converter made of them (rope_freqs.weight).

    Factors that are not of that form are given as they are.
    """
    factors = keys.vector("rope_freqs.weight")
    if factors is None or all(factor == 1 for factor in factors):
        return None
    if len(factors) != size // 2 or theta <= 1:
        raise keys.wrong("rope.freq_base", f"above 1, with factors for {size // 2} frequencies", theta)
    low, high, original, factor = 1.0, 4.0, 8192, max(factors)
    waves = 2 * np.pi * theta ** (np.arange(0, size, 2, dtype=np.float64) / size)
    smooth = np.clip((original / waves - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if np.allclose(expected, factors, rtol=1e-5):
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
    return {
        "rope_type": "longrope",
        "long_factor": factors,
        "short_factor": factors,
        "original_max_position_embeddings": keys.integer("context_length"),
        "attention_factor": 1.0,
    }


def has_bias(keys: Keys, module: str) -> bool:
    return keys.has(f"blk.0.{module}.bias")
