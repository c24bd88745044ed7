"""Encodes a graph as launches of kernels: for each operation, a function that launches it over a step's values."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quire.devices import ops
from quire.devices.cuda import peers
from quire.devices.cuda.arena import matrices
from quire.devices.cuda.encoders import attention, exchanges, mixtures, products, rows, states
from quire.devices.cuda.kernels import norm
from quire.devices.cuda.launch import Launcher
from quire.devices.cuda.pack import own_matrix
from quire.devices.cuda.plain import encode_plain
from quire.devices.graph import Graph
from quire.devices.operands import Norm
from quire.devices.ops import Op, Value
from quire.devices.peers import Peers
from quire.devices.protocol import Array
from quire.devices.recurrent_ops import EmbedNgrams
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.devices.cuda.step import CudaStep

Call = Callable[["CudaStep"], None]
Encoders = dict[type[Op[Any]], Callable[["Recorder", Any, Value], Call]]


class Recorder:
    """Gives encoders of operations the launcher, and tensors of the device."""

    def __init__(self, run: Launcher, device: Any, act: Any) -> None:
        self.run, self.device, self.act = run, device, act
        self._sums: peers.RankSums | None = None

    def tensor(self, values: Array | None) -> Any:
        """Place float32 values on the device; None stays None."""
        return None if values is None else torch.tensor(np.asarray(values, np.float32), device=self.device)

    def sums(self, of: Peers | None, ranks: int) -> peers.RankSums:
        """Return what adds the ranks' parts: one for all sums."""
        if self._sums is None:
            self._sums = peers.RankSums(self.run, of, ranks)
        return self._sums

    def norm(self, given: Norm | None) -> Any:
        """Place a norm on the device; None stays None."""
        if given is None:
            return None
        weight, bias = self.tensor(given.weight), self.tensor(given.bias)
        return norm.NormTensors(given.kind, weight, bias, given.eps, given.after_rope)


def encode(graph: Graph, recorder: Recorder, wrong: Container[int] = ()) -> list[Call]:
    """Encode a graph that `check_operations` accepts, operation by operation; those at `wrong` plainly."""
    return [
        encode_plain(op, Value(index), graph)
        if index in wrong
        else ENCODERS[type(op)](recorder, op, Value(index))
        for index, op in enumerate(graph.ops)
    ]


def needs_host(call: Call, step: CudaStep) -> bool:
    """Tell whether the host takes part in a launch over steps of a size, so that no graph can hold it."""
    return isinstance(call, exchanges.Collective) and not call.fits(step)


def check_operations(graph: Graph) -> None:
    """Raise ConfigError for operations that no kernel computes, by name."""
    lacking = {name for op in graph.ops for name in _lacking(op)}
    if lacking:
        raise ConfigError(
            f"the model needs {', '.join(sorted(lacking))}, which no GPU kernel computes yet: choose --device cpu"
        )


def _lacking(op: Any) -> Iterator[str]:
    """Name what no kernel computes of an operation."""
    name = type(op).__name__
    if type(op) not in ENCODERS:
        yield name
    if isinstance(op, (ops.RunExperts, ops.HeadLinear)):
        weights = matrices(op)  # of experts up and down in turn
        sides = [weights[0::2], weights[1::2]] if isinstance(op, ops.RunExperts) else [weights]
        if any(len({own_matrix(weight).form for weight in side}) > 1 for side in sides):
            yield f"{name} of weights of several types (--dtype float32 decodes them)"
    if isinstance(op, EmbedNgrams) and len({table.shape[1] for table in op.tables}) > 1:
        yield "EmbedNgrams of tables of several widths"


ENCODERS: Encoders = {
    **attention.ENCODERS,
    **exchanges.ENCODERS,
    **mixtures.ENCODERS,
    **products.ENCODERS,
    **rows.ENCODERS,
    **states.ENCODERS,
}
