"""The MLP of a layer: a gated one (Shazeer 2020, arXiv:2002.05202), or a plain one."""

from __future__ import annotations

import msgspec
import numpy as np

from quire.devices.graph import Recorder
from quire.devices.ops import Apply, GatedLinear, Multiply, Scale, Value
from quire.devices.protocol import XIELU, Activation, FloatArray, SparseGELU
from quire.model.parts.linear import Linear, Output, output_messages
from quire.model.parts.norm import Norm, NormConfig
from quire.model.parts.part import FeedForward
from quire.model.parts.source import Piece, Recording, WeightSource, matrix_of, read_vector
from quire.model.shard import Shard


class MLPConfig(FeedForward, msgspec.Struct, frozen=True, tag="mlp"):
    """I = `intermediate_size`.

    Without a gate, `xielu` is the activation, with parameters of its own. `down_norm` norms what the last projection
    reads. `cutoff`: the gate keeps only what exceeds its mean by `cutoff` standard deviations (SparseGELU). `limit`
    bounds the factors of the gated product (0: none). `scales` multiply the gate before its activation, and the result.
    """

    hidden_size: int
    intermediate_size: int
    activation: Activation
    gated: bool = True
    bias: bool = False
    xielu: bool = False
    down_norm: NormConfig | None = None
    cutoff: float | None = None
    limit: float = 0.0
    scales: tuple[float, float] = (1.0, 1.0)

    @property
    def gathers(self) -> bool:
        # A norm or a sparse gate reads all inputs.
        return self.down_norm is not None or self.cutoff is not None

    def columns(self, whole_experts: bool) -> list[int]:
        return [self.intermediate_size]

    def messages(self, shard: Shard) -> list[int]:
        own = [len(shard.columns(self.intermediate_size))]  # a sparse gate, and what it multiplies
        return output_messages(shard, self.hidden_size, own if self.cutoff is None else own * 2)

    def make(self, source: WeightSource, path: str, shard: Shard) -> MLP:
        return MLP(self, source, f"{path}.mlp", shard)


class MLP:
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))); ranks have columns of the middle."""

    def __init__(self, config: MLPConfig, source: WeightSource, path: str, shard: Shard) -> None:
        self._config, self._shard = config, shard
        d, inner = config.hidden_size, config.intermediate_size
        own = shard.columns(inner)
        rows = None if shard.whole else own
        gate, up = (matrix_of(f"{path}.{name}", inner, d, rows) for name in ("gate", "up"))
        self._gate: Linear | None = None
        self._up: Linear | None = None
        self._gated: GatedWeight | None = None
        if config.cutoff is not None:
            self._gate = Linear(source, f"{path}.gate", [gate])
            self._up = Linear(source, f"{path}.up", [up])
        elif config.gated:
            self._gated = GatedWeight(source, f"{path}.gate_up", gate, up, config.bias)
        else:
            self._up = Linear(source, f"{path}.up", [up], config.bias)
        self._xielu = _read_xielu(source, f"{path}.xielu") if config.xielu else None
        self._down_norm = None
        if config.down_norm is not None:
            self._down_norm = Norm(config.down_norm, source, f"{path}.down_norm", inner)
        self.out = Output(source, f"{path}.down", (d, inner), own, config.bias, shard)

    def compute(self, r: Recording, x: Value, stream: Value) -> tuple[Value, Output]:
        return self(r.g, x), self.out

    def __call__(self, g: Recorder, x: Value) -> Value:
        """What `out` projects: the inner activations [T, I]."""
        config = self._config
        if self._gated is not None:
            gate, down = config.scales
            x = x if gate == 1.0 else g(Scale(x, gate))  # and so up too
            inner = self._gathered(g, self._gated(g, x, config.activation, config.limit))
            inner = inner if down == gate else g(Scale(inner, down / gate))
        elif self._gate is not None and self._up is not None and config.cutoff is not None:
            gate, up = (self._gathered(g, linear(g, x)) for linear in (self._gate, self._up))
            inner = g(Multiply(g(Apply(gate, SparseGELU(config.cutoff))), up))
        else:
            assert self._up is not None
            activation = None if self._xielu is not None else config.activation
            inner = self._up(g, x, activation)
            inner = inner if self._xielu is None else g(Apply(inner, self._xielu))
            inner = self._gathered(g, inner)
        return inner if self._down_norm is None else self._down_norm(g, inner)

    def _gathered(self, g: Recorder, inner: Value) -> Value:
        if not self._shard.gathers:
            return inner
        return self._shard.gather(g, inner, self._shard.widths(self._config.intermediate_size))


class GatedWeight:
    """A gate and an up projection in one weight."""

    def __init__(self, source: WeightSource, path: str, gate: Piece, up: Piece, bias: bool) -> None:
        self.path, self.weight = path, source.gated(path, gate, up)
        self.bias: FloatArray | None = None
        if bias:
            self.bias = source.vector(f"{path}.bias", [gate.bias, up.bias])

    def __call__(self, g: Recorder, x: Value, activation: Activation, limit: float) -> Value:
        return g(GatedLinear(x, self.weight, activation, self.bias, limit, self.path))


def _read_xielu(source: WeightSource, path: str) -> XIELU:
    """The checkpoint stores the parameters before a softplus, which keeps them positive."""
    alpha_p, alpha_n, beta, eps = (
        float(read_vector(source, f"{path}.{key}", 1)[0]) for key in ("alpha_p", "alpha_n", "beta", "eps")
    )
    positive, negative = (float(np.logaddexp(0.0, np.float64(alpha))) for alpha in (alpha_p, alpha_n))
    return XIELU(positive, beta + negative, beta, eps)
