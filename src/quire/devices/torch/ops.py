"""Every operation in plain torch, in float32, executed at once on any device.

Products, sums and transcendental functions run on one row (or one query) at a time, with shapes that depend on that row
alone, because torch chooses algorithms, and so the order of a sum, by shape. That is what makes batched equal alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from quire.devices.adapters import StepAdapters
from quire.devices.host import all_gathered, all_reduced, received
from quire.devices.kv import FP8_MOST
from quire.devices.operands import padded_positions
from quire.devices.protocol import (
    GELU,
    Activation,
    Array,
    Attention,
    Clamp,
    ColumnScale,
    Elementwise,
    Expert,
    FloatArray,
    IntArray,
    Matrix,
    Norm,
    Peers,
    Rope,
    Routing,
    SparseGELU,
    Temperature,
    WeightType,
    experts_width,
)
from quire.devices.reference.weights import ReferenceMatrix
from quire.devices.torch.attention import attend, first_seen
from quire.devices.torch.cache import TorchStep
from quire.devices.torch.rows import (
    activate,
    gate,
    matched_rms,
    mixed,
    relative,
    relative_places,
    route_row,
    sparse_gelu,
    xielu,
)
from quire.errors import EngineError
from quire.weights.activations import Rounding
from quire.weights.layouts.rounding import LEAST
from quire.weights.schemes import input_rounding
from quire.weights.tensor import QuantTensor


class TorchMatrix:
    """A weight [O, K] as float32, rounded to its type."""

    def __init__(self, values: Any, rounding: Rounding | None) -> None:
        self.values, self.rounding = values, rounding

    @classmethod
    def pack(cls, parts: Sequence[Array | QuantTensor], dtype: WeightType, device: Any) -> TorchMatrix:
        if device.type == "meta":  # an outline: a shape without values
            shape = sum(part.shape[0] for part in parts), parts[0].shape[1]
            return cls(torch.empty(shape, device=device), input_rounding(dtype))
        rounded = ReferenceMatrix(parts, dtype)
        return cls(torch.tensor(np.ascontiguousarray(rounded.dequantize()), device=device), rounded.rounding)

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes)

    @property
    def greedy_nbytes(self) -> int:
        return self.nbytes

    def dequantize(self) -> FloatArray:
        values: FloatArray = self.values.cpu().numpy()
        return values

    def times(self, row: Any) -> Any:
        """weight @ row: [K] -> [O]."""
        if self.rounding is not None:
            row = rounded_row(row, self.rounding)
        return torch.mv(self.values, row)


def own_matrix(weight: Matrix) -> TorchMatrix:
    if not isinstance(weight, TorchMatrix):
        raise EngineError(
            f"the torch backend got a weight of {type(weight).__name__}; load the model with it"
        )
    return weight


def rounded_row(row: Any, rounding: Rounding) -> Any:
    """A row [K]; roundings other than int8 around 0 are the oracle's own, on the host."""
    if rounding == Rounding(number="int8", columns=rounding.columns):
        return round_int8_by(row, rounding.columns)
    return torch.from_numpy(rounding.round(row.cpu().numpy()[None])[0]).to(row.device)


def round_int8_by(row: Any, columns: int) -> Any:
    """`round_int8` of a row [K] with one scale for each so many columns; 0: for the whole row."""
    width = len(row)
    if columns == 0 or columns >= width:
        return round_int8(row)
    whole = functional.pad(row, (0, -width % columns))
    return round_int8(whole.reshape(-1, columns)).reshape(-1)[:width]


def round_int8(x: Any) -> Any:
    """Round each row [..., K] to integers from -127 to 127 times its own scale."""
    most = x.abs().amax(-1, keepdim=True)
    inverse = torch.where(most >= float(LEAST), 127 / most.clamp(min=float(LEAST)), 0)
    return torch.round(x * inverse) * (most / 127)


def by_row(function: Callable[[Any], Any], x: Any) -> Any:
    """`function` of each row alone, in equally aligned memory, because BLAS chooses by alignment too."""
    if not len(x):  # a step may read no rows
        return function(x.new_zeros(x.shape[1:]))[None][:0]
    return torch.stack([function(row.clone()) for row in x])


def tensor_like(x: Any, values: FloatArray) -> Any:
    return torch.from_numpy(np.array(values, np.float32)).to(x.device)


def normalize(row: Any, weight: Any, bias: Any, norm: Norm) -> Any:
    """RMSNorm or LayerNorm of the last axis, with statistics in float64."""
    x = row.double()
    if norm.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + norm.eps) * weight
    return (y if bias is None else y + bias).float()


def norm_row(norm: Norm, like: Any) -> Callable[[Any], Any]:
    weight = tensor_like(like, norm.weight)
    bias = None if norm.bias is None else tensor_like(like, norm.bias)
    return lambda row: normalize(row, weight, bias, norm)


def norm_heads(heads_NH: Any, norm: Norm) -> Any:
    """One token's queries or keys: one weight for all heads, one per head, or statistics over all heads together."""
    function = norm_row(norm, heads_NH)
    if norm.weight.ndim == 1 and norm.weight.size == heads_NH.numel():
        return function(heads_NH.reshape(-1)).reshape(heads_NH.shape)
    return function(heads_NH)


def rotate(x_NH: Any, angles: Any) -> Any:
    """Rope on the first rotary_dim elements of each head; `angles` [rotary_dim]: cosines, then sines."""
    half = len(angles) // 2
    cos, sin = angles[:half], angles[half:]
    first, second, rest = x_NH[:, :half], x_NH[:, half : 2 * half], x_NH[:, 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=1)


def prepare_heads(heads_NH: Any, norm: Norm | None, angles: Any) -> Any:
    """One token's queries or keys, normed and rotated in the norm's order."""
    if norm is not None and not norm.after_rope:
        heads_NH = norm_heads(heads_NH, norm)
    if angles is not None:
        heads_NH = rotate(heads_NH, angles)
    return norm_heads(heads_NH, norm) if norm is not None and norm.after_rope else heads_NH


class TorchOps:
    """`Ops` over one step."""

    def __init__(self, step: TorchStep, adapters: StepAdapters) -> None:
        self.step, self._kv, self.adapters = step, step.cache, adapters
        self.tapped: list[Any] = []

    def embed(self, table: Matrix, scale: float = 1.0) -> Any:
        rows = own_matrix(table).values[self.step.tokens_T]
        for i, token in enumerate(self.step.tokens_T.tolist() if self.adapters.active else ()):
            change = self.adapters.embedding(i, table)
            if change is None:
                continue
            y = rows[i] if change.weight is None else own_matrix(change.weight).values[token]
            for up in change.ups:
                assert change.down is not None
                low = change.down[up.first :, token][: up.weight.shape[1]]
                y = y + torch.mv(tensor_like(y, up.weight), tensor_like(y, low))
            rows[i] = y if change.gain is None else y * tensor_like(y, change.gain)
        return rows * scale

    def embed_positions(self, table: Matrix, offset: int) -> Any:
        return own_matrix(table).values[self.step.positions_T + offset]

    def add(self, x: Any, other: Any, scale: float = 1.0) -> Any:
        return x + scale * other

    def scale(self, x: Any, scale: float, cap: float | None = None) -> Any:
        if cap is None:
            return x * scale
        return by_row(lambda row: cap * torch.tanh(row * scale / cap), x)

    def multiply(self, x: Any, factors: Any) -> Any:
        return x * factors.repeat_interleave(x.shape[1] // factors.shape[1], dim=1)

    def elementwise(self, x: Any, op: Elementwise) -> Any:
        if isinstance(op, Clamp):
            return x.clamp(-op.limit, op.limit)
        if isinstance(op, Temperature):
            steps = (self.step.positions_T + op.offset).div(op.length, rounding_mode="floor")
            scales = [1 + op.beta * math.log(1 + step) for step in steps.tolist()]
            return x * torch.tensor(scales, device=x.device)[:, None]
        if isinstance(op, GELU):
            return by_row(functional.gelu, x)
        if isinstance(op, ColumnScale):
            return x * tensor_like(x, np.array(op.factors))
        if isinstance(op, SparseGELU):
            return by_row(partial(sparse_gelu, op), x)
        return by_row(partial(xielu, op), x)

    def combine(self, x: Any, factors: FloatArray, residual: Any = None) -> Any:
        return mixed(x, tensor_like(x, factors).expand(len(x), *factors.shape), residual)

    def mix(self, x: Any, factors: Any, vectors: int, residual: Any = None) -> Any:
        return mixed(x, factors.reshape(len(x), factors.shape[1] // vectors, vectors), residual)

    def match_rms(self, x: Any, like: Any, floor: float) -> Any:
        return matched_rms(x, like, floor)

    def norm(self, x: Any, norm: Norm) -> Any:
        if self.adapters.active:
            return torch.stack(
                [norm_row(self.adapters.norm(i, norm), x)(row.clone()) for i, row in enumerate(x)]
            )
        return by_row(norm_row(norm, x), x)

    def _products(self, x: Any, weight: Matrix, bias: FloatArray | None, places: Sequence[int]) -> Any:
        """x @ weight.T + bias as adapters change it; row i of x belongs to row places[i] of the step."""
        y = by_row(own_matrix(weight).times, x)
        added = y if bias is None else y + tensor_like(x, bias)
        for i, place in enumerate(places if self.adapters.active else ()):
            change = self.adapters.product(place, weight)
            if change is None:
                continue
            row = y[i] if change.weight is None else own_matrix(change.weight).times(x[i].clone())
            for up in change.ups:
                assert change.down is not None
                down = tensor_like(x, change.down[up.first : up.first + up.weight.shape[1]])
                low = torch.mv(tensor_like(x, up.weight), torch.mv(down, x[i].clone()))
                row = row.clone()
                row[up.start : up.start + len(low)] += low
            if change.gain is not None:
                row = row * tensor_like(x, change.gain)
            for vector in (bias if change.bias is None else change.bias, change.shift):
                row = row if vector is None else row + tensor_like(x, vector)
            added[i] = row
        return added

    def linear(
        self,
        x: Any,
        weight: Matrix,
        bias: FloatArray | None = None,
        activation: Activation | None = None,
        residual: Any = None,
    ) -> Any:
        y = self._products(x, weight, bias, range(len(x)))
        if activation is not None:
            y = by_row(lambda row: activate(activation, row), y)
        return y if residual is None else y + residual

    def gated_linear(
        self,
        x: Any,
        weight: Matrix,
        activation: Activation,
        bias: FloatArray | None = None,
        limit: float = 0.0,
    ) -> Any:
        return self._gated(x, weight, activation, bias, range(len(x)), limit)

    def _gated(
        self,
        x: Any,
        weight: Matrix,
        activation: Activation,
        bias: FloatArray | None,
        places: Sequence[int],
        limit: float,
    ) -> Any:
        y = self._products(x, weight, bias, places)
        half = y.shape[1] // 2
        return by_row(lambda row: gate(activation, row[:half], row[half:], limit), y)

    def rope_angles(self, rope: Rope) -> Any:
        angles_TR = self.step.positions_T.float()[:, None] * tensor_like(self.step.positions_T, rope.inv_freq)
        return by_row(lambda row: rope.scale * torch.cat([torch.cos(row), torch.sin(row)]), angles_TR)

    def store_kv(
        self,
        qkv: Any,
        layer: int,
        num_heads: int,
        angles: Any,
        q_norm: Norm | None,
        k_norm: Norm | None,
        v_norm: Norm | None = None,
    ) -> Any:
        kept = self._kv.spec.layer(layer)
        groups, head_dim = kept.num_kv_heads, kept.head_dim
        heads = qkv.reshape(len(qkv), num_heads + 2 * groups, head_dim)
        queries = []
        for t, heads_NH in enumerate(heads):
            q, k, v = heads_NH.split([num_heads, groups, groups])
            turn = None if angles is None else angles[t]
            q, k = prepare_heads(q, q_norm, turn), prepare_heads(k, k_norm, turn)
            queries.append(q.reshape(-1))
            self._store(layer, t, k, prepare_heads(v, v_norm, None))
        self._echo(layer)
        return torch.stack(queries)

    def queries(self, q: Any, num_heads: int, angles: Any, norm: Norm | None) -> Any:
        rows = q.reshape(len(q), num_heads, -1)
        turns = [None] * len(q) if angles is None else angles
        return torch.stack(
            [prepare_heads(row, norm, turn).reshape(-1) for row, turn in zip(rows, turns, strict=True)]
        )

    def store_latent(self, kv: Any, q_latent: Any, q_rope: Any, layer: int, angles: Any, norm: Norm) -> Any:
        latent, rotary = len(norm.weight), angles.shape[1]
        num_heads = q_latent.shape[1] // latent
        normed, queries = norm_row(norm, kv), []
        for t, row in enumerate(kv):
            key = torch.cat([normed(row[:latent]), rotate(row[None, latent:], angles[t])[0]])
            self._store(layer, t, key[None], None)
            turned = rotate(q_rope[t].reshape(num_heads, rotary), angles[t])
            queries.append(torch.cat([q_latent[t].reshape(num_heads, latent), turned], dim=1).reshape(-1))
        self._echo(layer)
        return torch.stack(queries)

    def head_linear(self, x: Any, weights: Sequence[Matrix]) -> Any:
        heads = x.chunk(len(weights), dim=1)
        return torch.cat([self.linear(head, w) for head, w in zip(heads, weights, strict=True)], dim=1)

    def route(
        self,
        scores: Any,
        routing: Routing,
        correction: FloatArray | None = None,
        weight_scales: FloatArray | None = None,
    ) -> Any:
        bias = None if correction is None else tensor_like(scores, correction)
        scales = None if weight_scales is None else tensor_like(scores, weight_scales)
        return by_row(lambda row: route_row(row, routing, bias, scales), scores)

    def experts(
        self,
        x: Any,
        routes: Any,
        experts: Sequence[Expert | None],
        activation: Activation,
        weigh_inputs: bool = False,
    ) -> Any:
        chosen, width = routes.shape[1] // 2, experts_width(x.shape[1], experts)
        rows = []
        for t, row in enumerate(x):
            total = torch.zeros(width, dtype=torch.float64, device=x.device)
            for place in torch.argsort(routes[t, :chosen]).tolist():
                expert, weight = experts[int(routes[t, place])], routes[t, chosen + place]
                y = row[None] * weight if weigh_inputs else row[None]
                if expert is not None:
                    inner = self._gated(y, expert.up, activation, expert.up_bias, [t], expert.limit)
                    y = self._products(inner, expert.down, expert.down_bias, [t])
                total += y[0].double() * (1.0 if weigh_inputs else weight.double())
            rows.append(total.float())
        return torch.stack(rows)

    def relative_scores(
        self, by_query: Any, by_key: Any, num_heads: int, places: IntArray, scale: float
    ) -> Any:
        like = by_key if by_query is None else by_query
        out = like.new_zeros((len(like), num_heads, padded_positions(places)))
        for seq in self.step.sequences:
            index = relative_places(seq.length, places).to(like.device)
            rows = slice(seq.begin, seq.end)
            out[rows, :, : seq.length] = scale * relative(by_query, by_key, rows, num_heads, index)
        return out.reshape(len(like), -1)

    def attention(self, q: Any, layer: int, num_heads: int, attention: Attention, scores: Any = None) -> Any:
        """One softmax over everything that a query sees, not tiled."""
        keys, values = self._kv.keys[layer], self._kv.values[layer]
        sinks = None if attention.sinks is None else tensor_like(q, attention.sinks)
        rows = []
        for seq in self.step.sequences:
            own_keys = keys[seq.places].float() * self._kv.key_scales[layer]
            own_values = values[seq.places].float() * self._kv.value_scales[layer]
            for t in range(seq.begin, seq.end):
                position = seq.start + t - seq.begin
                seen = slice(first_seen(position, attention), min(position + attention.ahead + 1, seq.length))
                query = q[t].reshape(1, num_heads, -1)
                added = None if scores is None else scores[t].reshape(num_heads, 1, -1)[:, :, seen]
                around = seen.start, position, attention, sinks, added
                out = attend(query, own_keys[seen], own_values[seen], *around)
                rows.append(out.reshape(-1))
        return torch.stack(rows)

    def all_reduce(self, x: Any, peers: Peers | None) -> Any:
        return torch.from_numpy(all_reduced(x.cpu().numpy(), peers)).to(x.device)

    def all_gather(self, x: Any, widths: Sequence[int], peers: Peers | None) -> Any:
        return torch.from_numpy(all_gathered(x.cpu().numpy(), widths, peers)).to(x.device)

    def select_rows(self, x: Any) -> Any:
        self.adapters.select_rows(self.step.logit_rows_L.tolist())
        return x[self.step.logit_rows_L]

    def receive(self, width: int) -> Any:
        return torch.from_numpy(received(self.step.inputs, width)).to(self._kv.device)

    def tap(self, x: Any) -> None:
        self.tapped.append(x)

    def _echo(self, layer: int) -> None:
        """Store the keys and values of ModelInput.echoes_E2 in the other sequences' blocks."""
        step, echoes = self.step, self.step.inputs.echoes_E2
        for t, b in [] if echoes is None else echoes.tolist():
            place = step.sequences[b].places[int(step.inputs.positions_T[t])]
            for side in (self._kv.keys[layer], self._kv.values[layer]):
                side[place] = side[step.places_T[t]]

    def _store(self, layer: int, t: int, keys_GH: Any, values_GH: Any) -> None:
        place, dtype = self.step.places_T[t], self._kv.spec.dtype
        sides = (
            (self._kv.keys, keys_GH, self._kv.key_scales),
            (self._kv.values, values_GH, self._kv.value_scales),
        )
        for side, new, scales in sides:
            if new is None:
                continue
            new = new / scales[layer]
            if (most := FP8_MOST.get(dtype)) is not None:
                new = new.clamp(-most, most)
            side[layer][place] = (round_int8(new) if dtype == "int8" else new).to(side[layer].dtype)
