"""What all parts of an assembly share: the source of weights, and readers of vectors, norms, matrices and biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

from quire.devices.protocol import FloatArray, Matrix, Norm
from quire.model.families.names import TensorNames
from quire.model.shard import WHOLE, Shard
from quire.model.spec import ArchSpec
from quire.weights.parts import Part, Take, chain, part, transposed

# The use of a matrix decides its type: products; the embedding; the head, or an embedding tied to it; learned
# positions; matrices that stay float32.
Use = Literal["linear", "table", "head", "positions", "exact"]


class WeightSource(Protocol):
    """Supplies the weight of a part, in the type that its use calls for."""

    def matrix(self, parts: Sequence[Part], use: Use = "linear") -> Matrix: ...

    def gated(self, gate: Part, up: Part) -> Matrix: ...

    def vector(self, parts: Sequence[Part]) -> FloatArray: ...


class PartAssembly:
    """Assembles a part of one model, as far as it belongs to `shard`."""

    def __init__(
        self, spec: ArchSpec, names: TensorNames, source: WeightSource, shard: Shard = WHOLE
    ) -> None:
        self.spec, self.names, self.source, self.shard = spec, names, source, shard

    def _vector(self, name: str, size: int, own: range | None = None) -> FloatArray:
        """A vector of `size` elements, or its `own` ones."""
        return self.source.vector([part(name, (size,)).cut(own)])

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

    def _output(self, whole: Part, columns: range | None) -> Part:
        """A projection that ends attention or MLP: this rank's columns, or its rows if ranks gather the inputs."""
        if self.shard.gathers(self.spec):
            return whole.cut(self.shard.columns(self.spec.hidden_size))
        return whole.cut(columns=columns)

    def _output_bias(self, wanted: bool, tensor: str, divided: bool = True) -> FloatArray | None:
        """The bias of such a projection. If ranks add their parts, the first one adds the bias."""
        width = self.spec.hidden_size
        whole = part(tensor, (width,))
        if divided and self.shard.gathers(self.spec):
            whole = whole.cut(self.shard.columns(width))
        elif divided and not self.shard.first:
            return None
        return self.source.vector([whole]) if wanted else None

    def _bias(self, wanted: bool, *parts: tuple[str, int, Take | None]) -> FloatArray | None:
        if not wanted:
            return None
        return self.source.vector([part(f"{name}.bias", (size,), take) for name, size, take in parts])
