"""TensorNames: where a family keeps its tensors, as data. Knows no file format and reads nothing (tensors.py does)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

GGUF_LAYER = "blk.{i}."


class TensorNames(msgspec.Struct, frozen=True):
    """Names of modules; a tensor is module.weight or module.bias. Defaults fit Llama and its descendants.

    `layer` is the prefix of layer {i}; the names after it follow that. Where a module holds several layers
    (`sublayers`), {i} is its number and {j}, in any name, the layer's number in it. None or "" means that the family
    has nothing of the kind. `qkv` names a fused projection: stacked (q, k, v), grouped (for each kv head its queries,
    its key, its value), or in four blocks of q, v and k (CodeGen). `gate_up` is a fused gate and up, `shared_gate_up`
    the shared expert's. `transposed`: matrices of layers are stored [K, O]. `interleaved`: rotary pairs are neighbours.
    `norm_offset` is added to the weights of norms.

    `experts` is the prefix of expert {e}; if `expert_stack` is given, of tensors [E, ...] that hold all experts, with
    outputs as their rows or as their columns. Gate and up then alternate, are halves with `expert_halves`, or are two
    tensors if `expert_gate_apart` names the gate's.

    `altup` and `laurel` are prefixes; {s} is the number of a stream less one.

    `ignored` are patterns of whole names that hold nothing to load (buffers that are computed from the config). `base`
    begins the names of all but the head; a checkpoint of the base model alone leaves it out, and one of several parts
    may begin with one of `prefixes` instead.
    """

    base: str = "model."
    sublayers: int = 1
    prefixes: tuple[str, ...] = ()

    embedding: str = "model.embed_tokens"
    positions: str = ""
    segments: str = ""
    position_bias: str = ""
    relative: str = ""
    relative_norm: str = ""
    relative_keys: str = ""
    relative_queries: str = ""
    relative_keys_bias: bool = True
    q_bias: str = ""  # vectors of their own, beside a fused projection without biases
    v_bias: str = ""
    out_bias: str = ""
    embedding_norm: str = ""
    project_in: str = ""
    project_out: str = ""
    norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{i}."
    attention_norm: str = "input_layernorm"
    attention_post_norm: str = ""
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str | None = None
    qkv_layout: Literal["stacked", "grouped", "blocks"] = "stacked"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    norm_by_head: bool = False  # norms of queries and keys are q_norm.{n} with n a head
    sinks: str = "self_attn.sinks"
    attention_gate: str = "self_attn.gate_proj"
    out_norm: str = ""
    out: str = "self_attn.o_proj"
    q_down: str = "self_attn.q_a_proj"
    q_down_norm: str = "self_attn.q_a_layernorm"
    q_up: str = "self_attn.q_b_proj"
    kv_down: str = "self_attn.kv_a_proj_with_mqa"
    kv_down_norm: str = "self_attn.kv_a_layernorm"
    kv_up: str = "self_attn.kv_b_proj"
    mlp_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = ""
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str | None = None
    down: str = "mlp.down_proj"
    down_norm: str = ""
    xielu: str = "mlp.act_fn"
    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    correction_row: bool = False  # stored as [1, E]
    experts: str = "mlp.experts.{e}."
    expert_gate: str = "gate_proj"
    expert_up: str = "up_proj"
    expert_down: str = "down_proj"
    expert_stack: Literal["", "columns", "rows"] = ""
    expert_halves: bool = False
    expert_gate_apart: str = ""
    moe_norm: str = ""
    moe_pre_norm: str = ""
    mlp_beside_norm: str = ""
    router_scale: str = ""
    expert_scales: str = ""
    shared: str = "mlp.shared_expert."
    shared_gate_up: str | None = None
    shared_down: str = "down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    layer_scale: str = ""
    per_layer_table: str = ""
    per_layer_model: str = ""
    per_layer_norm: str = ""
    per_layer_gate: str = ""
    per_layer_out: str = ""
    per_layer_post_norm: str = ""
    altup: str = "altup."
    spread: str = "model.altup_projections.{s}"
    merge: str = "model.altup_unembed_projections.{s}"
    laurel: str = "laurel."
    transposed: bool = False
    interleaved: bool = False
    norm_offset: float = 0.0
    ignored: tuple[str, ...] = (r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)

    def fitted(self, present: Iterable[str]) -> TensorNames:
        """Replace `base` by the prefix that the tensors have, or by none.

        Experts that the family stacks may be tensors of their own.
        """
        present = list(present)
        names = self
        if self.expert_stack and any(f"{self.experts}0." in name for name in present):
            own, fused = TensorNames(), f"{self.shared}{self.shared_gate_up}.weight"
            whole = any(name.endswith(fused) for name in present)
            names = replace(
                names,
                experts=f"{self.experts}{{e}}.",
                expert_gate=own.expert_gate,
                expert_up=own.expert_up,
                expert_down=own.expert_down,
                expert_stack="",
                expert_halves=False,
                shared_gate_up=self.shared_gate_up if whole else None,
            )
        for prefix in (*self.prefixes, self.base):
            if any(name.startswith(prefix) for name in present):
                return names._rebased(prefix)
        return names._rebased("")

    def of_sublayer(self, j: int) -> TensorNames:
        """Give the names of the j-th layer of each module."""
        if self.sublayers == 1:
            return self
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        return replace(
            self,
            **{k: v.replace("{j}", str(j)) for k, v in values.items() if isinstance(v, str) and "{j}" in v},
        )

    def _rebased(self, prefix: str) -> TensorNames:
        if prefix == self.base:
            return self
        changed: dict[str, Any] = {}
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name != "base" and isinstance(value, str) and value.startswith(self.base):
                changed[name] = prefix + value.removeprefix(self.base)
        own = re.escape(self.base)
        changed["ignored"] = tuple(
            re.escape(prefix) + pattern.removeprefix(own) if pattern.startswith(own) else pattern
            for pattern in self.ignored
        )
        if prefix.endswith(f".{self.base}"):  # the whole model with its head lies inside another
            changed["head"] = prefix.removesuffix(self.base) + self.head
        return replace(self, **changed)

    def is_ignored(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)


def bert_names(base: str, *ignored: str) -> TensorNames:
    """Name BERT's tensors below `base`. `ignored` name heads' tensors, which are read where they are used."""
    escaped = base.replace(".", r"\.")
    return TensorNames(
        base=base,
        embedding=f"{base}embeddings.word_embeddings",
        positions=f"{base}embeddings.position_embeddings",
        segments=f"{base}embeddings.token_type_embeddings",
        embedding_norm=f"{base}embeddings.LayerNorm",
        layer=f"{base}encoder.layer.{{i}}.",
        q="attention.self.query",
        k="attention.self.key",
        v="attention.self.value",
        out="attention.output.dense",
        attention_post_norm="attention.output.LayerNorm",
        up="intermediate.dense",
        down="output.dense",
        mlp_post_norm="output.LayerNorm",
        ignored=(rf"{escaped}embeddings\.position_ids", rf"{escaped}pooler\.dense\..*", *ignored),
    )
