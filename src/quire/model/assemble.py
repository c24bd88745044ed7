"""From a spec and tensor names to decoder weights, part by part. Knows the place of each tensor; reads no file itself.

Over a `WeightSource` that reads and packs, it loads a model. Over one that only records requests, it lists the
tensors that a checkpoint must have. So both always agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal, Protocol

import numpy as np
from msgspec.structs import replace

from quire.devices.protocol import XIELU, Array, Expert, FloatArray, Matrix, Norm
from quire.model.decoder import (
    AttentionWeights,
    DecoderWeights,
    LatentWeights,
    LayerWeights,
    MLPWeights,
    MoEWeights,
)
from quire.model.families.names import TensorNames
from quire.model.rope import sinusoids
from quire.model.spec import ArchSpec, LatentSpec, MoESpec
from quire.weights.parts import (
    Part,
    Take,
    chain,
    halves,
    part,
    row_range,
    rows_of_groups,
    transposed,
)

# The use of a matrix decides its type: products; the embedding; the head, or an embedding tied to it; learned
# positions; matrices that stay float32.
Use = Literal["linear", "table", "head", "positions", "exact"]


class WeightSource(Protocol):
    """Supplies the weight of a part, in the type that its use calls for."""

    def matrix(self, parts: Sequence[Part], use: Use = "linear") -> Matrix: ...

    def gated(self, gate: Part, up: Part) -> Matrix: ...

    def vector(self, parts: Sequence[Part]) -> FloatArray: ...


class Assembly:
    """Assembles the weights of one model."""

    def __init__(self, spec: ArchSpec, names: TensorNames, source: WeightSource) -> None:
        self.spec, self.names, self.source = spec, names, source

    def weights(self) -> DecoderWeights:
        spec, names = self.spec, self.names
        d, width = spec.hidden_size, spec.embedding_size or spec.hidden_size
        embedding = self.source.matrix(
            [self._embedding_part(width)], "head" if spec.has_head and spec.tie_embeddings else "table"
        )
        positions = None
        if spec.position_offset is not None:
            shape = (spec.max_position + spec.position_offset, d)
            positions = self.source.matrix([self._positions_part(shape)], "positions")
        project_in = project_out = None
        if spec.embedding_size is not None:
            project_in = self.source.matrix([part(f"{names.project_in}.weight", (d, width))])
            project_out = self.source.matrix([part(f"{names.project_out}.weight", (width, d))])
        return DecoderWeights(
            embedding=embedding,
            positions=positions,
            project_in=project_in,
            embedding_norm=self._norm(names.embedding_norm) if spec.embedding_norm else None,
            layers=tuple(self.layer(i) for i in range(spec.num_layers)),
            norm=self._norm(names.norm) if spec.final_norm else None,
            project_out=project_out,
            head=self._head(embedding),
            head_bias=self._vector(f"{names.head}.bias", spec.vocab_size) if spec.head_bias else None,
        )

    def _embedding_part(self, width: int) -> Part:
        """The embedding table of tokens; with segments, the sums of tokens and segments, segment after segment."""
        spec, names = self.spec, self.names
        if not spec.segments:
            return part(f"{names.embedding}.weight", (spec.vocab_size, width))

        def summed(words: Array, segments: Array) -> Array:
            table = words.astype(np.float32)
            return np.concatenate([table + row for row in segments[: spec.segments].astype(np.float32)])

        words = (f"{names.embedding}.weight", (spec.vocab_size // spec.segments, width))
        segments = (f"{names.segments}.weight", (spec.segment_rows, width))
        return Part((words, segments), summed, (spec.vocab_size, width))

    def _positions_part(self, shape: tuple[int, int]) -> Part:
        if self.spec.sinusoid is None:
            return part(f"{self.names.positions}.weight", shape)
        steps = shape[1] // 2 - (self.spec.sinusoid == "half_less_one")
        return Part((), partial(sinusoids, *shape, steps), shape)

    def _head(self, embedding: Matrix) -> Matrix | None:
        if not self.spec.has_head:
            return None
        return embedding if self.spec.tie_embeddings else self.source.matrix([self.head_part], "head")

    @property
    def head_part(self) -> Part:
        spec = self.spec
        return part(f"{self.names.head}.weight", (spec.vocab_size, spec.embedding_size or spec.hidden_size))

    def layer(self, i: int) -> LayerWeights:
        spec, names = self.spec, self.names
        layer = names.layer.format(i=i)
        before = spec.placement not in ("post", "sum")
        after = spec.placement in ("post", "sum", "sandwich")
        sparse = spec.is_sparse(i)
        return LayerWeights(
            attention_norm=self._norm(layer + names.attention_norm)
            if before and (i or not spec.bare_first)
            else None,
            attention=self._attention(i, layer),
            attention_post_norm=self._norm(layer + names.attention_post_norm) if after else None,
            mlp_norm=self._norm(layer + names.mlp_norm) if before and spec.placement != "parallel" else None,
            mlp=None if sparse else self._mlp(layer),
            moe=self._moe(layer, spec.moe) if sparse and spec.moe is not None else None,
            mlp_post_norm=self._norm(layer + names.mlp_post_norm) if after else None,
        )

    def _vector(self, name: str, size: int) -> FloatArray:
        return self.source.vector([part(name, (size,))])

    def _norm(self, name: str, size: int | None = None, eps: float | None = None) -> Norm:
        spec, size = self.spec, size or self.spec.hidden_size
        if spec.norm_weight:
            weight = self._vector(f"{name}.weight", size) + self.names.norm_offset
        else:
            weight = np.ones(size, np.float32)
        bias = self._vector(f"{name}.bias", size) if spec.norm_bias else None
        return Norm(spec.norm, weight, bias, spec.norm_eps if eps is None else eps)

    def _linear(self, module: str, out: int, width: int, *takes: Take) -> Part:
        """A matrix stored as [out, width], and the rows or columns taken from it."""
        stored, flip = ((width, out), transposed) if self.names.transposed else ((out, width), None)
        return part(f"{module}.weight", stored, chain(flip, *takes))

    def _bias(self, wanted: bool, *parts: tuple[str, int, Take | None]) -> FloatArray | None:
        if not wanted:
            return None
        return self.source.vector([part(f"{name}.bias", (size,), take) for name, size, take in parts])

    def _attention(self, i: int, layer: str) -> AttentionWeights:
        spec, names = self.spec, self.names
        d, heads = spec.hidden_size, spec.num_heads * spec.head_dim
        qkv = bias = latent = None
        if spec.latent is not None:
            latent = self._latent(layer, spec.latent)
            heads = spec.num_heads * spec.latent.value_dim
        else:
            places = self._qkv(layer)
            qkv = self.source.matrix(
                [self._linear(name, size, d, *([take] if take else [])) for name, size, take in places]
            )
            bias = self._bias(spec.qkv_bias, *places)
        return AttentionWeights(
            qkv=qkv,
            qkv_bias=bias,
            q_norm=self._head_norm(layer + names.q_norm, spec.num_heads) if spec.norms_qk(i) else None,
            k_norm=self._head_norm(layer + names.k_norm, spec.num_kv_heads) if spec.norms_qk(i) else None,
            sinks=self._vector(layer + names.sinks, spec.num_heads) if spec.has_sinks(i) else None,
            latent=latent,
            gate=self._attention_gate(layer),
            out_norm=self._norm(layer + names.out_norm, heads) if spec.inner_norms else None,
            out=self.source.matrix([self._linear(layer + names.out, d, heads)]),
            out_bias=self._bias(spec.o_bias, (layer + names.out, d, None)),
        )

    def _attention_gate(self, layer: str) -> Matrix | None:
        spec = self.spec
        if spec.attention_gate is None:
            return None
        width = spec.num_heads * (spec.head_dim if spec.attention_gate == "elements" else 1)
        return self.source.matrix([self._linear(layer + self.names.attention_gate, width, spec.hidden_size)])

    def _qkv(self, layer: str) -> list[tuple[str, int, Take | None]]:
        """Modules of q, k and v, with their stored rows and the part to take."""
        spec, names = self.spec, self.names
        h, n, g = spec.head_dim, spec.num_heads, spec.num_kv_heads
        turn = None
        if names.interleaved and spec.rope is not None:
            turn = halves(h, spec.rope.rotary_dim)
        if names.qkv is None:
            q, k, v = layer + names.q, layer + names.k, layer + names.v
            return [(q, n * h, turn), (k, g * h, turn), (v, g * h, None)]
        module, size, each = layer + names.qkv, (n + 2 * g) * h, n // g * h
        if names.qkv_layout == "stacked":
            if turn is None:
                return [(module, size, None)]
            q_rows, k_rows, v_rows = (
                row_range(0, n * h),
                row_range(n * h, (n + g) * h),
                row_range((n + g) * h, size),
            )
        elif names.qkv_layout == "blocks":
            block = n * h // 4
            bounds = ((0, block), (2 * block, 3 * block), (block, 2 * block))
            q_rows, k_rows, v_rows = (rows_of_groups(4, *pair) for pair in bounds)
        else:
            bounds = ((0, each), (each, each + h), (each + h, each + 2 * h))
            q_rows, k_rows, v_rows = (rows_of_groups(g, *pair) for pair in bounds)
        return [
            (module, size, chain(q_rows, turn)),
            (module, size, chain(k_rows, turn)),
            (module, size, v_rows),
        ]

    def _head_norm(self, name: str, heads: int) -> Norm:
        spec, names = self.spec, self.names
        eps = spec.norm_eps if spec.qk_norm_eps is None else spec.qk_norm_eps
        if not spec.qk_norm_weight:
            return Norm(spec.norm, np.ones(spec.head_dim, np.float32), None, eps, spec.qk_norm_after_rope)
        h, own = spec.head_dim, spec.qk_norm == "own_head"
        turn = halves(h, spec.rope.rotary_dim) if names.interleaved and spec.rope is not None else None

        def read(kind: str) -> FloatArray:
            if names.norm_by_head:
                return self.source.vector([part(f"{name}.{n}.{kind}", (h,), turn) for n in range(heads)])
            if own:
                flat = chain(lambda array: array.reshape(-1), turn)
                return self.source.vector([part(f"{name}.{kind}", (heads, h), flat)])
            size = heads * h if spec.qk_norm == "all_heads" else h
            return self.source.vector([part(f"{name}.{kind}", (size,), turn)])

        weight = read("weight") + names.norm_offset
        bias = read("bias") if spec.qk_norm_bias else None
        if own:
            weight, bias = weight.reshape(-1, h), None if bias is None else bias.reshape(-1, h)
        return Norm(spec.norm, weight, bias, eps, spec.qk_norm_after_rope)

    def _latent(self, layer: str, latent: LatentSpec) -> LatentWeights:
        spec, names = self.spec, self.names
        d, n, rank, nope, rope = (
            spec.hidden_size,
            spec.num_heads,
            latent.kv_rank,
            latent.nope_dim,
            latent.rope_dim,
        )
        turn = halves(rope, rope) if names.interleaved else None
        width, module = latent.q_rank or d, layer + (names.q if latent.q_rank is None else names.q_up)

        def queries(start: int, stop: int, take: Take | None) -> Matrix:
            picked = chain(rows_of_groups(n, start, stop), take)
            return self.source.matrix([part(f"{module}.weight", (n * (nope + rope), width), picked)])

        def by_head(head: int, start: int, stop: int, take: Take | None) -> Matrix:
            size = nope + latent.value_dim
            picked = chain(row_range(head * size + start, head * size + stop), take)
            return self.source.matrix([part(f"{layer}{names.kv_up}.weight", (n * size, rank), picked)])

        down = f"{layer}{names.kv_down}.weight", (rank + rope, d)
        return LatentWeights(
            q_down=self.source.matrix([part(f"{layer}{names.q_down}.weight", (width, d))])
            if latent.q_rank
            else None,
            q_down_bias=self._bias(latent.bias and bool(latent.q_rank), (layer + names.q_down, width, None)),
            q_norm=self._scaled_norm(layer + names.q_down_norm, width, latent.norm_eps, latent.q_scale)
            if latent.q_rank
            else None,
            q_nope=queries(0, nope, None),
            q_rope=queries(nope, nope + rope, turn),
            kv_down=self.source.matrix(
                [part(*down, row_range(0, rank)), part(*down, chain(row_range(rank, rank + rope), turn))]
            ),
            kv_down_bias=self._latent_bias(layer, latent, turn),
            kv_norm=self._scaled_norm(layer + names.kv_down_norm, rank, latent.norm_eps, latent.kv_scale),
            keys=tuple(by_head(head, 0, nope, transposed) for head in range(n)),
            values=tuple(by_head(head, nope, nope + latent.value_dim, None) for head in range(n)),
        )

    def _scaled_norm(self, name: str, size: int, eps: float, scale: float) -> Norm:
        norm = self._norm(name, size, eps)
        return norm if scale == 1.0 else replace(norm, weight=norm.weight * np.float32(scale))

    def _latent_bias(self, layer: str, latent: LatentSpec, turn: Take | None) -> FloatArray | None:
        if not latent.bias:
            return None
        name, rank = f"{layer}{self.names.kv_down}.bias", latent.kv_rank
        size = rank + latent.rope_dim
        return self.source.vector(
            [part(name, (size,), row_range(0, rank)), part(name, (size,), chain(row_range(rank, size), turn))]
        )

    def _mlp(self, layer: str) -> MLPWeights:
        spec, names = self.spec, self.names
        d, inner, bias = spec.hidden_size, spec.intermediate_size, spec.mlp_bias
        if not spec.gated:
            up = self.source.matrix([self._linear(layer + names.up, inner, d)])
            up_bias = self._bias(bias, (layer + names.up, inner, None))
        elif names.gate_up is None:
            gate, other = layer + names.gate, layer + names.up
            up = self.source.gated(self._linear(gate, inner, d), self._linear(other, inner, d))
            up_bias = self._bias(bias, (gate, inner, None), (other, inner, None))
        else:
            module = layer + names.gate_up
            first, second = row_range(0, inner), row_range(inner, 2 * inner)
            up = self.source.gated(
                self._linear(module, 2 * inner, d, first), self._linear(module, 2 * inner, d, second)
            )
            up_bias = self._bias(bias, (module, 2 * inner, None))
        return MLPWeights(
            up=up,
            up_bias=up_bias,
            xielu=self._xielu(layer + names.xielu) if spec.xielu else None,
            down_norm=self._norm(layer + names.down_norm, inner) if spec.inner_norms else None,
            down=self.source.matrix([self._linear(layer + names.down, d, inner)]),
            down_bias=self._bias(bias, (layer + names.down, d, None)),
        )

    def _xielu(self, name: str) -> XIELU:
        """The checkpoint stores the parameters before a softplus, which keeps them positive."""
        alpha_p, alpha_n = (self._vector(f"{name}.{key}", 1) for key in ("alpha_p", "alpha_n"))
        beta, eps = (
            self.source.vector([part(f"{name}.{key}", (), np.atleast_1d)]) for key in ("beta", "eps")
        )
        softplus = [float(np.logaddexp(0.0, np.float64(alpha[0]))) for alpha in (alpha_p, alpha_n)]
        return XIELU(softplus[0], float(beta[0]) + softplus[1], float(beta[0]), float(eps[0]))

    def _moe(self, layer: str, moe: MoESpec) -> MoEWeights:
        names, d = self.names, self.spec.hidden_size
        scored, inner = moe.routing.num_experts, moe.intermediate_size
        count = scored - moe.zero_experts
        router = [part(f"{layer}{names.router}.weight", (scored, d))]
        if moe.routing.shared_gate:
            router.append(part(f"{layer}{names.shared_gate}.weight", (1, d)))
        if names.expert_stack:
            experts: list[Expert | None] = [self._stacked_expert(layer, moe, e) for e in range(count)]
        else:
            modules = names.expert_gate, names.expert_up, names.expert_down
            experts = [self._expert(layer + names.experts.format(e=e), inner, modules) for e in range(count)]
        experts += [None] * moe.zero_experts
        if moe.routing.shared:
            experts.append(self._shared_expert(layer + names.shared, moe.shared_intermediate_size))
        return MoEWeights(
            router=self.source.matrix(router, "exact"),
            router_bias=self._bias(moe.bias, (layer + names.router, count, None)),
            correction=self._correction(layer + names.correction, scored) if moe.correction else None,
            experts=tuple(experts),
            norm=self._norm(layer + names.moe_norm) if moe.norm else None,
        )

    def _correction(self, name: str, count: int) -> FloatArray:
        if self.names.correction_row:
            return self.source.vector([part(name, (1, count), lambda array: array[0])])
        return self._vector(name, count)

    def _shared_expert(self, prefix: str, inner: int) -> Expert:
        names, d = self.names, self.spec.hidden_size
        if names.shared_gate_up is None:
            own = names.expert_gate, names.expert_up, names.expert_down
            return self._expert(
                prefix, inner, ("gate_proj", "up_proj", "down_proj") if names.expert_stack else own
            )
        whole, shape = f"{prefix}{names.shared_gate_up}.weight", (2 * inner, d)
        up = self.source.gated(
            part(whole, shape, row_range(0, inner)), part(whole, shape, row_range(inner, 2 * inner))
        )
        down = self.source.matrix([part(f"{prefix}{names.shared_down}.weight", (d, inner))])
        return Expert(up, None, down, None)

    def _expert(self, prefix: str, inner: int, modules: tuple[str, str, str]) -> Expert:
        d, (gate_name, up_name, down_name) = self.spec.hidden_size, modules
        gate = part(f"{prefix}{gate_name}.weight", (inner, d))
        up = part(f"{prefix}{up_name}.weight", (inner, d))
        down = part(f"{prefix}{down_name}.weight", (d, inner))
        return Expert(self.source.gated(gate, up), None, self.source.matrix([down]), None)

    def _stacked_expert(self, layer: str, moe: MoESpec, e: int) -> Expert:
        """Expert e, from tensors that hold all experts."""
        names, d = self.names, self.spec.hidden_size
        count, inner = moe.routing.num_experts, moe.intermediate_size

        def matrix(name: str, out: int, width: int, place: int, of: int) -> Part:
            """Rows of `out`: all of them (of = 1), or the gate's or the up projection's half (of = 2)."""
            whole, taken = layer + names.experts + name, slice(place, None, of)
            if names.expert_halves:
                taken = slice(place * out // of, (place + 1) * out // of)
            if names.expert_stack == "columns":
                return part(whole, (count, width, out), lambda array: array[e].T[taken])
            return part(whole, (count, out, width), lambda array: array[e, taken])

        def bias(name: str, size: int, take: Take) -> Part:
            return part(f"{layer}{names.experts}{name}_bias", (count, size), take)

        def every_second(first: int) -> Take:
            def take(array: Array) -> Array:
                return array[e, first::2]

            return take

        gate_up, down = names.expert_up, names.expert_down
        gate, up = (matrix(gate_up, 2 * inner, d, first, 2) for first in (0, 1))
        biases = [bias(gate_up, 2 * inner, every_second(first)) for first in (0, 1)]
        return Expert(
            self.source.gated(gate, up),
            self.source.vector(biases) if moe.bias else None,
            self.source.matrix([matrix(down, d, inner, 0, 1)]),
            self.source.vector([bias(down, d, lambda array: array[e])]) if moe.bias else None,
        )
