"""The attention of a layer, from tensor names to weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from quire.devices.protocol import Array, FloatArray, Matrix, Norm
from quire.model.assemble_parts import PartAssembly
from quire.model.rope import position_buckets
from quire.model.spec import LatentSpec, LayerShape
from quire.model.spec_parts import RelativeSpec
from quire.model.weights import AttentionWeights, LatentWeights, RelativeWeights
from quire.weights.parts import (
    Part,
    Take,
    chain,
    halves,
    padded_rows,
    part,
    row_range,
    rows_of_groups,
    transposed,
)

Place = tuple[str, int, Take | None]  # a module, its stored rows, and the part to take


class AttentionAssembly(PartAssembly):
    """Assembles the attention of layers."""

    def weights(self, i: int, layer: str) -> AttentionWeights:
        """The attention of layer `i`, whose tensors begin with `layer`."""
        spec, names, shape = self.spec, self.names, self.spec.shape(i)
        own, normed = spec.kv_source(i) == i, spec.norms_qk(i)
        qkv = bias = latent = None
        q_heads, kv_heads = self.shard.heads(spec, i)
        if spec.latent is not None:
            latent = self._latent(layer, spec.latent, q_heads)
            heads = shape.num_heads * spec.latent.value_dim
        else:
            heads = shape.num_heads * (spec.value_dim or shape.head_dim)
            places = self._own_places(self._qkv(i, layer), shape, q_heads, kv_heads)[: None if own else 1]
            qkv = self.source.matrix(self._qkv_parts(shape, places, kv_heads))
            bias = self._qkv_bias(layer, shape) if names.q_bias else self._bias(spec.qkv_bias, *places)
        return AttentionWeights(
            qkv=qkv,
            qkv_bias=bias,
            q_norm=self._head_norm(shape, layer + names.q_norm, shape.num_heads, q_heads) if normed else None,
            k_norm=self._head_norm(shape, layer + names.k_norm, shape.num_kv_heads, kv_heads)
            if normed and own
            else None,
            v_norm=self._value_norm(shape) if spec.value_norm and own else None,
            position_bias=None
            if spec.position_buckets is None
            else self._position_bias(spec.position_buckets),
            relative=None if spec.relative is None else self._relative(layer, shape, spec.relative),
            sinks=self._vector(layer + names.sinks, shape.num_heads, q_heads) if spec.has_sinks(i) else None,
            latent=latent,
            gate=self._attention_gate(shape, layer, q_heads),
            out_norm=self._norm(layer + names.out_norm, heads) if spec.inner_norms else None,
            out=self.source.matrix([self._own_output(self._out(shape, layer, heads), shape, q_heads)]),
            out_bias=self._output_bias(
                spec.has_out_bias(i),
                layer + (names.out_bias or f"{names.out}.bias"),
                self.shard.divides_attention(spec),
            ),
        )

    def _own_places(
        self, places: list[Place], shape: LayerShape, q_heads: range, kv_heads: range
    ) -> list[Place]:
        """The rows of q, k and v that belong to the shard."""
        if self.shard.whole:
            return places
        h = shape.head_dim
        rows = [row_range(heads.start * h, heads.stop * h) for heads in (q_heads, kv_heads, kv_heads)]
        return [
            (module, size, chain(take, own)) for (module, size, take), own in zip(places, rows, strict=True)
        ]

    def _own_output(self, out: Part, shape: LayerShape, q_heads: range) -> Part:
        """The part of the final projection that belongs to the shard."""
        if not self.shard.divides_attention(self.spec):
            return out
        width = self.spec.latent.value_dim if self.spec.latent is not None else shape.head_dim
        return self._output(out, range(q_heads.start * width, q_heads.stop * width))

    def _qkv_parts(self, shape: LayerShape, places: Sequence[Place], kv_heads: range) -> list[Part]:
        d = self.spec.hidden_size
        parts = [self._linear(name, size, d, *([take] if take else [])) for name, size, take in places]
        if self.spec.value_dim is not None and len(parts) == 3:
            parts[-1] = replace(parts[-1], shape=(len(kv_heads) * shape.head_dim, d))
        return parts

    def _out(self, shape: LayerShape, layer: str, heads: int) -> Part:
        """Heads [D, N V]; the columns of values shorter than keys are padded as the values are."""
        whole = self._linear(layer + self.names.out, self.spec.hidden_size, heads)
        if self.spec.value_dim is None:
            return whole
        pad = padded_rows(self.spec.value_dim, shape.head_dim)
        padded = (self.spec.hidden_size, shape.num_heads * shape.head_dim)
        return Part(whole.tensors, chain(whole.take, lambda array: pad(array.T).T), padded)

    def _position_bias(self, buckets: int) -> FloatArray:
        """The table [buckets, N] as a value for each head and distance [N, 2 reach + 1]."""
        heads, places = self.spec.num_heads, position_buckets(buckets)
        name, take = f"{self.names.position_bias}.weight", lambda table: table[places].T.reshape(-1)
        return self.source.vector([part(name, (buckets, heads), take)]).reshape(heads, len(places))

    def _qkv_bias(self, layer: str, shape: LayerShape) -> FloatArray:
        """Biases of queries and values; keys have none."""
        size = shape.num_heads * shape.head_dim
        zeros = Part((), lambda: np.zeros(size, np.float32), (size,))
        q, v = (part(layer + name, (size,)) for name in (self.names.q_bias, self.names.v_bias))
        return self.source.vector([q, zeros, v])

    def _relative(self, layer: str, shape: LayerShape, relative: RelativeSpec) -> RelativeWeights:
        names = self.names
        keys, queries = names.relative_keys, names.relative_queries
        if relative.shared:
            keys, queries = names.k, names.q
        biased = relative.shared or names.relative_keys_bias

        def heads(module: str, bias: bool) -> tuple[Matrix, ...]:
            parts = (
                self._distances(layer + module, shape, relative, h, bias) for h in range(shape.num_heads)
            )
            return tuple(self.source.matrix([one]) for one in parts)

        return RelativeWeights(
            heads(keys, biased) if relative.by_query else None,
            heads(queries, True) if relative.by_key else None,
        )

    def _distances(
        self, module: str, shape: LayerShape, relative: RelativeSpec, head: int, bias: bool
    ) -> Part:
        """The embeddings of distances through the rows of a projection that belong to a head: [2 span, H]."""
        d, size, eps = self.spec.hidden_size, shape.num_heads * shape.head_dim, self.spec.norm_eps
        own = slice(head * shape.head_dim, (head + 1) * shape.head_dim)
        norm = self.names.relative_norm if relative.normed else ""
        wanted: list[tuple[str, tuple[int, ...]]]
        wanted = [(f"{self.names.relative}.weight", (2 * relative.span, d)), (f"{module}.weight", (size, d))]
        wanted += [(f"{module}.bias", (size,))] if bias else []
        wanted += [(f"{norm}.{kind}", (d,)) for kind in ("weight", "bias")] if norm else []

        def project(*arrays: Array) -> Array:
            table, weight, *others = arrays
            table = table.astype(np.float64)
            if norm:
                table = table - table.mean(axis=1, keepdims=True)
                table = table / np.sqrt((table * table).mean(axis=1, keepdims=True) + eps)
                table = table * others[-2] + others[-1]
            made = table @ weight[own].T.astype(np.float64)
            return np.asarray(made + others[0][own] if bias else made, np.float32)

        return Part(tuple(wanted), project, (2 * relative.span, shape.head_dim))

    def _value_norm(self, shape: LayerShape) -> Norm:
        return Norm(self.spec.norm, np.ones(shape.head_dim, np.float32), None, self.spec.norm_eps)

    def _attention_gate(self, shape: LayerShape, layer: str, q_heads: range) -> Matrix | None:
        spec = self.spec
        if spec.attention_gate is None:
            return None
        each = shape.head_dim if spec.attention_gate == "elements" else 1
        gate = self._linear(layer + self.names.attention_gate, shape.num_heads * each, spec.hidden_size)
        return self.source.matrix([gate.cut(range(q_heads.start * each, q_heads.stop * each))])

    def _qkv(self, i: int, layer: str) -> list[Place]:
        """Modules of q, k and v, with their stored rows and the part to take."""
        spec, names, shape = self.spec, self.names, self.spec.shape(i)
        h, n, g = shape.head_dim, shape.num_heads, shape.num_kv_heads
        turn = None
        if names.interleaved and spec.rope is not None:
            turn = halves(h, spec.rope.rotary_dim)
        if names.qkv is None:
            q, k, v = layer + names.q, layer + names.k, layer + names.v
            if spec.keys_as_values is not None and spec.keys_as_values[i]:
                v = k
            if spec.value_dim is not None:
                return [
                    (q, n * h, turn),
                    (k, g * h, turn),
                    (v, g * spec.value_dim, padded_rows(spec.value_dim, h)),
                ]
            return [(q, n * h, turn), (k, g * h, turn), (v, g * h, None)]
        module, size, each = layer + names.qkv, (n + 2 * g) * h, n // g * h
        if names.qkv_layout == "stacked":
            if turn is None and self.shard.whole:
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

    def _head_norm(self, shape: LayerShape, name: str, heads: int, owned: range) -> Norm:
        spec, names = self.spec, self.names
        eps = spec.norm_eps if spec.qk_norm_eps is None else spec.qk_norm_eps
        if not spec.qk_norm_weight:
            return Norm(spec.norm, np.ones(shape.head_dim, np.float32), None, eps, spec.qk_norm_after_rope)
        h, own = shape.head_dim, spec.qk_norm == "own_head"
        turn = halves(h, spec.rope.rotary_dim) if names.interleaved and spec.rope is not None else None

        def read(kind: str) -> FloatArray:
            if names.norm_by_head:
                return self.source.vector([part(f"{name}.{n}.{kind}", (h,), turn) for n in owned])
            if own:
                flat = chain(lambda array: array.reshape(-1), turn)
                mine = range(owned.start * h, owned.stop * h)
                return self.source.vector([part(f"{name}.{kind}", (heads, h), flat).cut(mine)])
            size = heads * h if spec.qk_norm == "all_heads" else h
            return self.source.vector([part(f"{name}.{kind}", (size,), turn)])

        weight = read("weight") + names.norm_offset
        bias = read("bias") if spec.qk_norm_bias else None
        if own:
            weight, bias = weight.reshape(-1, h), None if bias is None else bias.reshape(-1, h)
        return Norm(spec.norm, weight, bias, eps, spec.qk_norm_after_rope)

    def _latent(self, layer: str, latent: LatentSpec, heads: range) -> LatentWeights:
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
            rows = range(heads.start * (stop - start), heads.stop * (stop - start))
            return self.source.matrix(
                [part(f"{module}.weight", (n * (nope + rope), width), picked).cut(rows)]
            )

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
            keys=tuple(by_head(head, 0, nope, transposed) for head in heads),
            values=tuple(by_head(head, nope, nope + latent.value_dim, None) for head in heads),
        )

    def _scaled_norm(self, name: str, size: int, eps: float, scale: float) -> Norm:
        norm = self._norm(name, size, eps)
        return norm if scale == 1.0 else msgspec.structs.replace(norm, weight=norm.weight * np.float32(scale))

    def _latent_bias(self, layer: str, latent: LatentSpec, turn: Take | None) -> FloatArray | None:
        if not latent.bias:
            return None
        name, rank = f"{layer}{self.names.kv_down}.bias", latent.kv_rank
        size = rank + latent.rope_dim
        return self.source.vector(
            [part(name, (size,), row_range(0, rank)), part(name, (size,), chain(row_range(rank, size), turn))]
        )
