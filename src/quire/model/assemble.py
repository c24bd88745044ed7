"""From a spec and tensor names to decoder weights, part by part. Knows where everything lies; reads no file itself.

Run over a `Source` that reads and packs, it loads a model; over one that only notes what it is asked for, it tells
which tensors a checkpoint must hold. So both always agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

from quire.devices.protocol import Array, Expert, FloatArray, Matrix, Norm
from quire.model.decoder import (
    AttentionWeights,
    DecoderWeights,
    LatentWeights,
    LayerWeights,
    MLPWeights,
    MoEWeights,
)
from quire.model.families.names import TensorNames
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


class Source(Protocol):
    """Gives weights for parts, in the type that their use asks for."""

    def matrix(self, parts: Sequence[Part], use: Use = "linear") -> Matrix: ...

    def gated(self, gate: Part, up: Part) -> Matrix: ...

    def vector(self, parts: Sequence[Part]) -> FloatArray: ...


class Assembly:
    """Assembles the weights of one model."""

    def __init__(self, spec: ArchSpec, names: TensorNames, source: Source) -> None:
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
            positions = self.source.matrix([part(f"{names.positions}.weight", shape)], "positions")
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
        """The table of tokens; with segments, the sums of tokens and segments, one segment after the other."""
        spec, names = self.spec, self.names
        if not spec.segments:
            return part(f"{names.embedding}.weight", (spec.vocab_size, width))

        def summed(words: Array, segments: Array) -> Array:
            table = words.astype(np.float32)
            return np.concatenate([table + row for row in segments[: spec.segments].astype(np.float32)])

        words = (f"{names.embedding}.weight", (spec.vocab_size // spec.segments, width))
        segments = (f"{names.segments}.weight", (spec.segment_rows, width))
        return Part((words, segments), summed, (spec.vocab_size, width))

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
            attention=self._attention(layer),
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
        weight = self._vector(f"{name}.weight", size) + self.names.norm_offset
        bias = self._vector(f"{name}.bias", size) if spec.norm_bias else None
        return Norm(spec.norm, weight, bias, spec.norm_eps if eps is None else eps)

    def _linear(self, module: str, out: int, width: int, *takes: Take) -> Part:
        """A matrix [out, width] as stored, then taken from."""
        stored, flip = ((width, out), transposed) if self.names.transposed else ((out, width), None)
        return part(f"{module}.weight", stored, chain(flip, *takes))

    def _bias(self, wanted: bool, *parts: tuple[str, int, Take | None]) -> FloatArray | None:
        if not wanted:
            return None
        return self.source.vector([part(f"{name}.bias", (size,), take) for name, size, take in parts])

    def _attention(self, layer: str) -> AttentionWeights:
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
            q_norm=self._head_norm(layer + names.q_norm, spec.num_heads),
            k_norm=self._head_norm(layer + names.k_norm, spec.num_kv_heads),
            sinks=self._vector(layer + names.sinks, spec.num_heads) if spec.sinks else None,
            latent=latent,
            out=self.source.matrix([self._linear(layer + names.out, d, heads)]),
            out_bias=self._bias(spec.o_bias, (layer + names.out, d, None)),
        )

    def _qkv(self, layer: str) -> list[tuple[str, int, Take | None]]:
        """Modules of q, k and v, with their rows as stored and what is taken."""
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
        else:
            bounds = ((0, each), (each, each + h), (each + h, each + 2 * h))
            q_rows, k_rows, v_rows = (rows_of_groups(g, *pair) for pair in bounds)
        return [
            (module, size, chain(q_rows, turn)),
            (module, size, chain(k_rows, turn)),
            (module, size, v_rows),
        ]

    def _head_norm(self, name: str, heads: int) -> Norm | None:
        spec, names = self.spec, self.names
        if spec.qk_norm is None:
            return None
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
        return Norm(spec.norm, weight, bias, spec.norm_eps)

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
            q_norm=self._norm(layer + names.q_down_norm, width, latent.norm_eps) if latent.q_rank else None,
            q_nope=queries(0, nope, None),
            q_rope=queries(nope, nope + rope, turn),
            kv_down=self.source.matrix(
                [part(*down, row_range(0, rank)), part(*down, chain(row_range(rank, rank + rope), turn))]
            ),
            kv_norm=self._norm(layer + names.kv_down_norm, rank, latent.norm_eps),
            keys=tuple(by_head(head, 0, nope, transposed) for head in range(n)),
            values=tuple(by_head(head, nope, nope + latent.value_dim, None) for head in range(n)),
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
            down=self.source.matrix([self._linear(layer + names.down, d, inner)]),
            down_bias=self._bias(bias, (layer + names.down, d, None)),
        )

    def _moe(self, layer: str, moe: MoESpec) -> MoEWeights:
        names, d = self.names, self.spec.hidden_size
        count, inner = moe.routing.num_experts, moe.intermediate_size
        router = [part(f"{layer}{names.router}.weight", (count, d))]
        if moe.routing.shared_gate:
            router.append(part(f"{layer}{names.shared_gate}.weight", (1, d)))
        if names.expert_stack:
            experts = [self._stacked_expert(layer, moe, e) for e in range(count)]
        else:
            experts = [self._expert(layer + names.experts.format(e=e), inner) for e in range(count)]
        if moe.routing.shared:
            experts.append(self._expert(layer + names.shared, moe.shared_intermediate_size))
        return MoEWeights(
            router=self.source.matrix(router, "exact"),
            router_bias=self._bias(moe.bias, (layer + names.router, count, None)),
            correction=self._vector(layer + names.correction, count) if moe.correction else None,
            experts=tuple(experts),
        )

    def _expert(self, prefix: str, inner: int) -> Expert:
        names, d = self.names, self.spec.hidden_size
        gate = part(f"{prefix}{names.expert_gate}.weight", (inner, d))
        up = part(f"{prefix}{names.expert_up}.weight", (inner, d))
        down = part(f"{prefix}{names.expert_down}.weight", (d, inner))
        return Expert(self.source.gated(gate, up), None, self.source.matrix([down]), None)

    def _stacked_expert(self, layer: str, moe: MoESpec, e: int) -> Expert:
        """Expert e of tensors that hold all; gate and up rows alternate (gpt-oss)."""
        names, d = self.names, self.spec.hidden_size
        count, inner = moe.routing.num_experts, moe.intermediate_size

        def matrix(name: str, out: int, width: int, first: int, step: int) -> Part:
            if names.expert_stack == "columns":
                return part(
                    layer + names.experts + name, (count, width, out), lambda array: array[e].T[first::step]
                )
            return part(
                layer + names.experts + name, (count, out, width), lambda array: array[e, first::step]
            )

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
