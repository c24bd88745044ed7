"""Reads the metadata of a GGUF file key by key, and refuses every key of the architecture that nobody read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from quire.errors import ModelError
from quire.model.parts.bounds import MAX_LAYERS
from quire.weights.gguf.checkpoint import GGUFParts
from quire.weights.gguf.kinds import PLAIN

HARMLESS = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.causal", "pooling_type")
# NEUTRAL: values at which a key changes nothing.
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
# OTHER_SENSES begin keys about pictures and sound, as files of one part hold them. Texts need none.
OTHER_SENSES = ("vision.", "audio.", "mm.", "projector.")
GATING = {1: "softmax", 2: "sigmoid", 3: "softmax of the chosen"}  # gguf.ExpertGatingFuncType
LEAST, MOST = 1e-30, 1e30  # bounds of numbers
# OVERRIDES and ROPE_OVERRIDES: keys of config.json that --hf-overrides may name.
OVERRIDES = {
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "num_experts_per_tok": "expert_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "final_logit_softcapping": "final_logit_softcapping",
    "attn_logit_softcapping": "attn_logit_softcapping",
}
ROPE_OVERRIDES = {
    "rope_theta": "rope.freq_base",
    "rope_type": "rope.scaling.type",
    "type": "rope.scaling.type",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "attention_factor": "rope.scaling.attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}


def overrides(changes: Mapping[str, Any], file: GGUFParts, prefix: str) -> dict[str, Any]:
    """Map --hf-overrides, which name keys of the file or of config.json, to keys of the file. ModelError for others."""
    found: dict[str, Any] = {}
    for name, value in changes.items():
        if name in ("rope_scaling", "rope_parameters"):
            if name == "rope_scaling" or set(value or {}) != {"rope_theta"}:
                found |= dict.fromkeys(file.keys_under(f"{prefix}rope.scaling."))
            given = {ROPE_OVERRIDES.get(key): item for key, item in (value or {}).items()}
            if None in given:
                raise ModelError(
                    f"{file.path}: {name} may hold {', '.join(ROPE_OVERRIDES)}, got {value!r:.80}"
                )
            found |= {f"{prefix}{key}": "none" if item == "default" else item for key, item in given.items()}
        elif name in OVERRIDES:
            found[prefix + OVERRIDES[name]] = value
        elif name.startswith(prefix):
            found[name] = value
        else:
            raise ModelError(
                f"{file.path}: --hf-overrides of a GGUF file may name its keys ({prefix}*), rope_scaling, "
                f"{', '.join(OVERRIDES)}; got {name:.80}"
            )
    return found


class Keys:
    """Reads keys of the file's architecture by their names without its prefix, and remembers which were read.

    `changes` are --hf-overrides. `architecture` takes the place of the file's own.
    """

    def __init__(
        self, file: GGUFParts, changes: Mapping[str, Any] | None = None, architecture: str | None = None
    ) -> None:
        own = file.get("general.architecture")
        if not isinstance(own, str):
            raise ModelError(f"{file.path}: general.architecture is missing; the file holds no model")
        self.file, self.architecture = file, architecture or own
        self._prefix = f"{own}."
        self._changes = overrides(changes or {}, file, self._prefix)
        self._unread = {*file.keys_under(self._prefix), *self._changes}
        blocks, extra = self.integer("block_count"), self.count("nextn_predict_layers")
        if blocks > MAX_LAYERS:
            raise self.wrong("block_count", f"at most {MAX_LAYERS}", blocks)
        if extra >= blocks:
            raise self.wrong("nextn_predict_layers", f"below {blocks}, the number of blocks", extra)
        self.blocks, self.layers = blocks, blocks - extra  # the last blocks predict further tokens

    def get(self, name: str) -> Any:
        """Return the value, or None. A float32 has the digits with which it was written."""
        key = self._prefix + name
        self._unread.discard(key)
        if key in self._changes:
            return self._changes[key]
        value = self.file.get(key)
        if self.file.first.is_single(key):
            return float(str(np.float32(value)))
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        """Read an integer above 0, given once or alike for each layer."""
        value = self.get(name)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value < 1 << 31:
            raise self.wrong(name, "an integer above 0, the same for all layers", value)
        return value

    def optional_integer(self, name: str) -> int | None:
        return None if self.get(name) is None else self.integer(name)

    def count(self, name: str) -> int:
        """Read an integer from 0; absent is 0."""
        return self.integer(name) if self.get(name) else 0

    def by_layer(self, name: str, default: int | None = None, low: int = 1) -> list[int]:
        """Read an integer for each layer, given once or by layer."""
        value = self.get(name)
        value = default if value is None else value
        values: list[Any] = value[: self.layers] if isinstance(value, list) else [value] * self.layers
        if len(values) != self.layers or any(type(x) is not int or not low <= x < 1 << 31 for x in values):
            raise self.wrong(name, f"an integer from {low}, or one for each layer", value)
        return values

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        value = default if value is None else value
        known = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is None or not known or (value != 0 and not LEAST <= value <= MOST):
            raise self.wrong(name, f"a number: 0, or from {LEAST} to {MOST}", value)
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """Read a number; absent or 0 is None."""
        return None if self.get(name) in (None, 0) else self.number(name)

    def numbers(self, key: str) -> list[float]:
        """Read a finite number for each layer, given once or by layer; `key` is the whole key."""
        value = self.file.get(key)
        values = value[: self.layers] if isinstance(value, list) else [value] * self.layers
        if len(values) != self.layers or any(type(x) is not float or not math.isfinite(x) for x in values):
            raise ModelError(
                f"{self.file.path}: {key} must be a number for each layer, got {str(value)[:80]}"
            )
        return values

    def slides(self, period: int) -> tuple[bool, ...]:
        """Tell which layers slide: by a flag for each, or all but every `period`-th."""
        return self.all_but_every(
            "attention.sliding_window_pattern", "attention.sliding_window_pattern", period
        )

    def all_but_every(self, name: str, of_period: str, period: int) -> tuple[bool, ...]:
        """Read a flag for each layer under `name`; else all but every n-th have it, n by `of_period` or `period`."""
        given = self.get(name)
        if isinstance(given, list):
            if len(given) != self.blocks or any(flag not in (0, 1) for flag in given):
                raise self.wrong(name, f"{self.blocks} flags", given)
            return tuple(bool(flag) for flag in given[: self.layers])
        period = self.integer(of_period, period)
        return tuple((i + 1) % period != 0 for i in range(self.layers))

    def expect(self, name: str, *values: object) -> None:
        """Refuse any value but these; the key may be absent."""
        if (value := self.get(name)) is not None and value not in values:
            raise self.wrong(name, " or ".join(map(str, values)), value)

    def expect_scoring(self, must: str, renormalize: bool | None = None) -> None:
        """Refuse experts that are scored in another way."""
        value = self.get("expert_gating_func")
        if value not in (None, 0) and GATING.get(value) != must:
            raise self.wrong("expert_gating_func", f"{must} ({GATING})", value)
        if renormalize is not None:
            self.expect("expert_weights_norm", renormalize)

    def wrong(self, name: str, must: str, value: object) -> ModelError:
        return ModelError(f"{self.file.path}: {self._prefix}{name} must be {must}, got {str(value)[:80]}")

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def has_bias(self, module: str) -> bool:
        """Tell whether any layer has a bias for this module."""
        return any(self.has(f"blk.{i}.{module}.bias") for i in range(self.layers))

    def rows(self, tensor: str) -> int:
        """Return the number of rows of a matrix. ModelError if the file has no such matrix."""
        entry = self.file.tensors.get(tensor)
        if entry is None or len(entry.shape) < 2:
            raise ModelError(f"{self.file.path}: no matrix {tensor}: the file holds no whole model")
        return entry.shape[0]

    def factors(self, tensor: str, length: int, most: float = 1e6) -> tuple[float, ...] | None:
        """Read a vector of `length` factors of frequencies; absent is None. ModelError for another vector."""
        entry = self.file.tensors.get(tensor)
        if entry is None:
            return None
        if entry.kind.name != "F32" or entry.shape != (length,):
            raise ModelError(f"{self.file.path}: tensor {tensor} must be a vector of {length} F32")
        values = self.file.raw(tensor).view(PLAIN["F32"])
        if not ((values >= 1e-6) & (values <= most)).all():
            raise ModelError(f"{self.file.path}: tensor {tensor} must hold factors from 1e-06 to {most}")
        return tuple(float(str(x)) for x in values)

    def finish(self) -> None:
        """Raise ModelError for keys that nobody read, unless harmless or at a neutral value."""
        for key in sorted(self._unread):
            name, value = key[len(self._prefix) :], self._changes.get(key, self.file.get(key))
            if name.startswith(OTHER_SENSES):
                continue
            if name not in HARMLESS and value is not None and value not in NEUTRAL.get(name, ()):
                raise ModelError(
                    f"{self.file.path}: {key} = {str(value)[:80]} is not understood and may change results"
                )
