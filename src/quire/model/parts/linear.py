"""Products with a weight: plain ones, and those that end attention or an MLP, whose results ranks put together."""

from __future__ import annotations

from collections.abc import Sequence

from quire.devices import ops
from quire.devices.graph import Recorder
from quire.devices.ops import Value
from quire.devices.protocol import Activation, FloatArray, Matrix
from quire.model.parts.source import Piece, Use, WeightSource, matrix_of
from quire.model.shard import Shard


class Linear:
    """activation(x W.T + bias) + residual, with W made of pieces [O_i, K] stacked on O."""

    def __init__(
        self,
        source: WeightSource,
        path: str,
        pieces: Sequence[Piece],
        bias: bool = False,
        use: Use = "linear",
    ) -> None:
        self.path = path
        self.weight: Matrix = source.matrix(path, pieces, use)
        self.bias: FloatArray | None = None
        if bias:
            self.bias = source.vector(f"{path}.bias", [piece.bias for piece in pieces])

    @classmethod
    def plain(
        cls, source: WeightSource, path: str, out: int, width: int, use: Use = "linear", bias: bool = False
    ) -> Linear:
        """A weight of one piece [out, width], whole on each rank."""
        return cls(source, path, [matrix_of(path, out, width)], bias, use)

    def __call__(
        self, g: Recorder, x: Value, activation: Activation | None = None, residual: Value | None = None
    ) -> Value:
        return g(ops.Linear(x, self.weight, self.bias, activation, residual, self.path))


def output_messages(shard: Shard, size: int, inputs: Sequence[int] = ()) -> list[int]:
    """What a rank sends per token for an `Output` of `size` elements, of whose inputs it has `inputs`, by message."""
    return [*inputs, len(shard.columns(size))] if shard.gathers else [size]


class Output:
    """The projection [out, width] that ends attention or an MLP.

    A rank has the `columns` of its inputs, and ranks add their results, to which the first adds the bias. Ranks that
    gather (Shard.gathers) have all inputs and rows of the outputs. Not `divided`: each rank has all of it.
    """

    def __init__(
        self,
        source: WeightSource,
        path: str,
        shape: tuple[int, int],
        columns: range,
        bias: bool,
        shard: Shard,
        divided: bool = True,
    ) -> None:
        self._shard, self._divided, self.out = shard, divided and not shard.whole, shape[0]
        rows = shard.columns(self.out) if self._divided and shard.gathers else None
        cut = columns if self._divided and not shard.gathers else None
        bias = bias and (rows is not None or not self._divided or shard.first)
        self._linear = Linear(source, path, [matrix_of(path, *shape, rows, cut)], bias)

    def __call__(self, g: Recorder, x: Value, residual: Value | None = None) -> Value:
        """residual + the projection of x, from what the ranks have of it."""
        if not self._divided:
            return self._linear(g, x, residual=residual)
        if not self._shard.gathers:
            return self._shard.sum(g, self.part(g, x, residual if self._shard.first else None))
        widths = self._shard.widths(self.out)
        y = self._shard.gather(g, self._linear(g, x), widths, residual is not None)
        return y if residual is None else g(ops.Add(residual, y))

    def part(self, g: Recorder, x: Value, residual: Value | None) -> Value:
        """This rank's part of the sum, and its `residual`."""
        return self._linear(g, x, residual=residual)
