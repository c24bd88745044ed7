"""Names and shapes of the tensors that a checkpoint must hold for a spec. Knows no file format."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.model.spec import ArchSpec

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Where a family keeps its tensors; defaults are those of Llama and its descendants.

    `layer` is the prefix of layer {i}. `ignored` are patterns of whole names that hold nothing to load
    (buffers that are computed from the config).
    """

    embedding: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    layer: str = "model.layers.{i}."
    attention_norm: str = "input_layernorm"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    out: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    ignored: tuple[str, ...] = (r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)

    def is_ignored(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)

    def in_layer(self, i: int, role: str, part: str = "weight") -> str:
        return f"{self.layer.format(i=i)}{role}.{part}"

    def expected(self, spec: ArchSpec) -> Shapes:
        """Every tensor that must be there, with its shape. A tied head is not among them."""
        d = spec.hidden_size
        shapes: Shapes = {self.embedding: (spec.vocab_size, d), self.norm: (d,)}
        if not spec.tie_embeddings:
            shapes[self.head] = (spec.vocab_size, d)
        for i in range(spec.num_layers):
            shapes.update(self._layer(spec, i))
        return shapes

    def _layer(self, spec: ArchSpec, i: int) -> Shapes:
        d, inner = spec.hidden_size, spec.intermediate_size
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        linears = (
            (self.q, q, d, spec.qkv_bias),
            (self.k, kv, d, spec.qkv_bias),
            (self.v, kv, d, spec.qkv_bias),
            (self.out, d, q, spec.o_bias),
            (self.gate, inner, d, spec.mlp_bias),
            (self.up, inner, d, spec.mlp_bias),
            (self.down, d, inner, spec.mlp_bias),
        )
        shapes: Shapes = {self.in_layer(i, role): (d,) for role in (self.attention_norm, self.mlp_norm)}
        for role, rows, columns, bias in linears:
            shapes[self.in_layer(i, role)] = (rows, columns)
            if bias:
                shapes[self.in_layer(i, role, "bias")] = (rows,)
        if spec.qk_norm:
            shapes.update({self.in_layer(i, role): (spec.head_dim,) for role in (self.q_norm, self.k_norm)})
        return shapes
