"""Operations that have no kernel, in plain torch over a device's tensors: row by row, exact, and slow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from quire.devices import ops
from quire.devices.cuda.cache import CudaKVCache
from quire.devices.cuda.fuse import NormalizeSum, RoundedGatedLinear, RoundedLinear
from quire.devices.cuda.pack import own_matrix
from quire.devices.graph import Graph
from quire.devices.ops import Op, Value, resolved
from quire.devices.protocol import Matrix, ModelInput
from quire.devices.step import StepAdapters
from quire.devices.torch.cache import TorchStep
from quire.devices.torch.ops import FORMULAS

if TYPE_CHECKING:
    from quire.devices.cuda.record import Call
    from quire.devices.cuda.step import CudaStep


class Side:
    """Keys or values [blocks, G, rows, H] of a layer by place, block * rows + row; int8 ones as what they stand for."""

    def __init__(self, tensor: Any, scales: Any) -> None:
        self._tensor, self._scales = tensor, scales if tensor.dtype == torch.int8 else None
        self.shape, self.dtype = tensor.shape, torch.float32 if tensor.dtype == torch.int8 else tensor.dtype

    def _at(self, places: Any) -> tuple[Any, ...]:
        rows = self._tensor.shape[2]
        return places // rows, slice(None), places % rows

    def __getitem__(self, places: Any) -> Any:
        found, at = self._tensor, self._at(places)
        return found[at] if self._scales is None else found[at].float() * self._scales[at][..., None]

    def __setitem__(self, place: Any, rounded: Any) -> None:
        at = self._at(place)
        if self._scales is not None:
            self._scales[at] = scales = rounded.abs().amax(-1) / 127
            rounded = (rounded / scales.clamp(min=1e-30)[..., None]).round().to(torch.int8)
        self._tensor[at] = rounded


class PlainCache:
    """A cache as formulas read and write it."""

    def __init__(self, cache: CudaKVCache) -> None:
        self.spec, self.block_size, self.device = cache.spec, cache.block_size, cache.device
        self.keys, self.values, self.key_scales, self.value_scales = [], [], [], []
        self.constants: dict[int, Any] = {}
        self.states = [[state.rows for state in layer] for layer in cache.states]
        self.open = [[state.waiting for state in layer] for layer in cache.states]
        fixed = cache.spec.dtype.startswith("fp8")
        for index, layer in enumerate(cache.layers):
            values, scales = layer.values, layer.value_scales
            if values is None:
                values, scales = layer.keys[..., : self.spec.layer(index).value_dim], layer.key_scales
            self.keys.append(Side(layer.keys, layer.key_scales))
            self.values.append(Side(values, scales))
            self.key_scales.append(layer.key_scales[:, None] if fixed else 1.0)
            self.value_scales.append(scales[:, None] if fixed else 1.0)


class PlainStep(TorchStep):
    """A step whose weights are those of kernels."""

    def times(self, weight: Matrix, x: Any) -> Any:
        own = own_matrix(weight)
        values = own.dense(torch.float32).double()
        if own.gated:  # formulas have the rows of the gate first
            values = torch.cat([values[::2], values[1::2]])
        return torch.stack([(row.double() @ values.T).float() for row in x])

    def embedded(self, table: Matrix, ids: Any) -> Any:
        rows = torch.as_tensor(ids).long().to(self.cache.device)
        return own_matrix(table).dense(torch.float32)[rows].float()


def plain_step(inputs: ModelInput, cache: CudaKVCache) -> TorchStep:
    """Make a step as formulas read it."""
    own: Any = PlainCache(cache)
    return PlainStep(inputs, own, StepAdapters({}, None))


def plain_value(op: Op[Value], step: CudaStep, graph: Graph) -> Any:
    """Return the result of an operation by its formula, in float32. The sum of a norm goes to its own place too."""
    plain = step.plain
    given: Any = resolved(op, lambda value: read(step, graph, value).float())
    if not isinstance(op, NormalizeSum):
        kind = PLAIN_OF.get(type(op), type(op))
        return FORMULAS[kind](plain, given)
    x, norm = given.x, FORMULAS[ops.Normalize]
    if op.first is not None:
        x = norm(plain, ops.Normalize(x, op.first)).to(step[op.x].dtype).float()
    if op.other is not None:
        x = x * op.factors[0] + given.other * op.factors[1]
    if op.total is not None:
        total = step.given(step[op.total], op.total)
        x = total.copy_(x).float()
    x = x if op.norm is None else norm(plain, ops.Normalize(x, op.norm))
    if op.codes is not None:
        put_codes(x, *(step.given(part, op.codes) for part in step.codes(op.codes)))
    return x


def put_codes(x: Any, codes: Any, scales: Any) -> None:
    """Round rows to int8 codes, with a scale each."""
    scales.copy_(x.abs().amax(1) / 127)
    codes.copy_((x / scales.clamp(min=1e-30)[:, None]).round())


PLAIN_OF: dict[Any, Any] = {RoundedLinear: ops.Linear, RoundedGatedLinear: ops.GatedLinear}
"""PLAIN_OF are the operations whose formula a fused one has."""


def read(step: CudaStep, graph: Graph, value: Value) -> Any:
    """Return the rows of a value that are not of the padding; of routes, ids and then weights."""
    if isinstance(graph.ops[value], ops.Route):
        ids, weights = step.routes(value)
        return step.given(torch.cat([ids.float(), weights], 1), value)
    return step.given(step[value], value)


def encode_plain(op: Op[Value], out: Value, graph: Graph) -> Call:
    """Compute an operation by its formula."""

    def call(step: CudaStep) -> None:
        if step[out].is_meta:  # nothing to launch
            return
        found = plain_value(op, step, graph)
        if not isinstance(op, ops.Route):
            step.given(step[out], out).copy_(found)
            return
        step.routes(out)[0].zero_()  # padding has experts too
        ids, weights = (step.given(part, out) for part in step.routes(out))
        ids.copy_(found[:, : ids.shape[1]])
        weights.copy_(found[:, ids.shape[1] :])

    return call
