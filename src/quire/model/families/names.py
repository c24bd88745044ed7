"""TensorNames: where a family keeps its tensors, as data. Knows no file format and reads nothing (tensors/ does)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec
from msgspec.structs import replace


class TensorNames(msgspec.Struct, frozen=True):
    """Names of modules by the paths of parts; a tensor is module.weight or module.bias.

    `layer` is the prefix of layer {i}; `modules` below layers follow it. Where a module holds several layers
    (`sublayers`), {i} is its number and {j}, in any name, the layer's number in it. A family that has nothing at a path
    lacks it. attention.qkv is a fused projection: stacked (q, k, v), grouped (for each kv head its queries, its key,
    its value), or in four blocks of q, v and k (CodeGen); mlp.gate_up a fused gate and up. `transposed`: matrices of
    layers are stored [K, O]. `interleaved`: rotary pairs are neighbours, with `index_interleaved` those of an indexer;
    with `index_last` the last elements of its heads turn. `norm_offset` is added to norms' weights.
    `rates` of recurrences are stored as logarithms, negative, or before a softplus, with `rates_axes` as [1, 1, H, 1];
    the taps of a convolution as [C, `taps_axes`, K].
    `tiled`: value heads of the delta rule lie by their number within the group of a key head.
    `ngram_shards`: tables of n-grams lie in that many shards, of a number of rows that the second number divides.
    `norm_by_head`: norms of queries and keys are q_norm.{n} with n a head. `correction_row`: it is stored as [1, E].

    mixture.experts is the prefix of expert {e}; if `expert_stack` is given, of tensors [E, ...] that hold all experts,
    with outputs as their rows or as their columns. Gate and up then alternate, are halves with `expert_halves`, or are
    two tensors if mixture.expert.gate_apart names the gate's. `plain_shared`: a shared expert has
    Llama's names. altup and laurel are prefixes; {s} is the number of a stream less one.

    further is the prefix of layers that predict further tokens, if they do not follow the last layer; below it lie what
    joins two hidden states, and norms, in modules of DeepSeek's names if there are no others.

    `by_mixer` replaces modules in layers of a mixer.
    `spellings` are other names of modules, by path, which some files have. `ignored` are patterns of whole names that
    hold nothing to load (buffers that are computed from the config). `base` begins the names of all but the head; a
    checkpoint of the base model alone leaves it out, and one of several parts may begin with one of `prefixes` instead.
    """

    modules: Mapping[str, str]
    layer: str = "model.layers.{i}."
    base: str = "model."
    sublayers: int = 1
    prefixes: tuple[str, ...] = ()
    qkv_layout: Literal["stacked", "grouped", "blocks"] = "stacked"
    norm_by_head: bool = False
    relative_keys_bias: bool = True
    correction_row: bool = False
    expert_stack: Literal["", "columns", "rows"] = ""
    expert_halves: bool = False
    transposed: bool = False
    interleaved: bool = False
    index_interleaved: bool = False
    index_last: bool = False
    norm_offset: float = 0.0
    plain_shared: bool = False
    rates: Literal["logarithms", "negative", "softplus"] = "logarithms"
    rates_axes: bool = False
    taps_axes: tuple[int, ...] = (1,)
    tiled: bool = False
    ngram_shards: tuple[int, int] = (1, 1)
    spellings: Mapping[str, str] = {}
    by_mixer: Mapping[str, Mapping[str, str]] = {}
    ignored: tuple[str, ...] = (r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)

    def __getitem__(self, path: str) -> str:
        """Return the name of a module; empty if the family has none."""
        return self.modules.get(path, "")

    def changed(self, changes: Mapping[str, Any]) -> TensorNames:
        """Replace fields by their names, and modules by their paths."""
        fields = {name: value for name, value in changes.items() if name in self.__struct_fields__}
        modules = {path: name for path, name in changes.items() if path not in fields}
        return replace(self, modules={**self.modules, **modules}, **fields)

    def fitted(self, present: Iterable[str]) -> TensorNames:
        """Replace `base` by the prefix that the tensors have, or by none.

        Experts that the family stacks may be tensors of their own.
        """
        present = list(present)
        names, experts, fused = self, self["mixture.experts"], self["mixture.shared.gate_up"]
        split = (name for name in present if f"{experts}0." in name) if self.expert_stack else ()
        if not all(map(self.is_ignored, split)):
            whole = any(name.endswith(f"{self['mixture.shared']}{fused}.weight") for name in present)
            plain = {path: LLAMA_NAMES[path] for path in EXPERT_MODULES}
            plain |= {"mixture.experts": f"{experts}{{e}}.", "mixture.shared.gate_up": fused if whole else ""}
            names = names.changed({**plain, "expert_stack": "", "expert_halves": False})
        for path, other in self.spellings.items():
            end = "" if other.endswith("_") else "."  # a prefix of several tensors
            start = self["mixture.shared"] if path.startswith("mixture.shared.") else ""
            if any(f".{start}{other}{end}" in f".{name}." for name in present):
                names = names.changed({path: other})
        for prefix in (*self.prefixes, self.base):
            if any(name.startswith(prefix) for name in present):
                return names._rebased(prefix)
        return names._rebased("")

    def without_layers(self, first: int, count: int = 1) -> TensorNames:
        """Ignore `count` layers from number `first` on."""
        if not count:
            return self
        numbers = "|".join(str(first + i) for i in range(count))
        start, _, end = map(re.escape, self.layer.partition("{i}"))
        return self.changed({"ignored": (*self.ignored, f"{start}({numbers}){end}.*")})

    def of_sublayer(self, j: int) -> TensorNames:
        """Give the names of the j-th layer of each module."""
        if self.sublayers == 1:
            return self
        return self.changed({path: name.replace("{j}", str(j)) for path, name in self.modules.items()})

    def _rebased(self, prefix: str) -> TensorNames:
        if prefix == self.base:
            return self

        def moved(name: str) -> str:
            return prefix + name.removeprefix(self.base) if name.startswith(self.base) else name

        changed: dict[str, Any] = {path: moved(name) for path, name in self.modules.items()}
        own = re.escape(self.base)
        changed |= {"layer": moved(self.layer), "base": prefix, "prefixes": ()}
        changed["ignored"] = tuple(
            re.escape(prefix) + pattern.removeprefix(own) if pattern.startswith(own) else pattern
            for pattern in self.ignored
        )
        if prefix.endswith(f".{self.base}"):  # the whole model with its head lies inside another
            changed["head"] = prefix.removesuffix(self.base) + self["head"]
        return self.changed(changed)

    def is_ignored(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)


EXPERT_MODULES = ("mixture.expert.gate", "mixture.expert.up", "mixture.expert.down")
# LLAMA_NAMES fit Llama and its descendants.
LLAMA_NAMES = TensorNames(
    {
        "embedding": "model.embed_tokens",
        "norm": "model.norm",
        "head": "lm_head",
        "attention_norm": "input_layernorm",
        "attention.q": "self_attn.q_proj",
        "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "attention.sinks": "self_attn.sinks",
        "attention.gate": "self_attn.gate_proj",
        "attention.out": "self_attn.o_proj",
        "attention.q_down": "self_attn.q_a_proj",
        "attention.q_down_norm": "self_attn.q_a_layernorm",
        "attention.q_up": "self_attn.q_b_proj",
        "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_norm": "self_attn.kv_a_layernorm",
        "attention.kv_up": "self_attn.kv_b_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
        "mlp.xielu": "mlp.act_fn",
        "mixture.router": "mlp.gate",
        "mixture.correction": "mlp.gate.e_score_correction_bias",
        "mixture.experts": "mlp.experts.{e}.",
        "mixture.expert.gate": "gate_proj",
        "mixture.expert.up": "up_proj",
        "mixture.expert.down": "down_proj",
        "mixture.shared": "mlp.shared_expert.",
        "mixture.shared.down": "down_proj",
        "mixture.shared_gate": "mlp.shared_expert_gate",
        "altup": "altup.",
        "spread": "model.altup_projections.{s}",
        "merge": "model.altup_unembed_projections.{s}",
        "laurel": "laurel.",
    }
)
