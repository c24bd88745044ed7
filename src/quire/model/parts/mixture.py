"""A mixture of experts (Shazeer et al. 2017, arXiv:1701.06538) in place of an MLP, or beside one."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from quire.devices import ops
from quire.devices.graph import Recorder
from quire.devices.ops import Add, Embed, Normalize, Route, RunExperts, Scale, Value
from quire.devices.protocol import Activation, Expert, Matrix, Routing
from quire.devices.protocol import Norm as NormOperand
from quire.errors import ModelError
from quire.model.parts.bounds import MAX_EXPERTS_DIM
from quire.model.parts.linear import Linear, Output
from quire.model.parts.mlp import MLP, GatedWeight, MLPConfig
from quire.model.parts.norm import Norm, NormConfig
from quire.model.parts.part import FeedForward
from quire.model.parts.source import Piece, Recording, WeightSource, matrix_of, read_vector
from quire.model.shard import PANEL, Shard, even

Division = Literal["parts", "experts", "rows", "copy"]
"""A rank has a part of each expert, some whole experts, all but rows of the last projections, or everything."""


class MixtureConfig(FeedForward, msgspec.Struct, frozen=True, tag="mixture"):
    """Routed experts with I = `intermediate_size`, and perhaps a shared one.

    `bias`: the router and the experts have biases; `correction`: the choice adds its own bias. `scale` multiplies the
    sum of all experts, including the shared one; with `norm` a norm follows. The last `zero_experts` of
    routing.num_experts return their input. A `dense` MLP may join them. With `beside` both read the residual stream
    through norms of their own, the router through one without weights, and their results are normed and added; the
    weight of each expert has a learned scale (Gemma 4); else the experts' result joins the residual stream after the
    layer that follows (LongCat). `score_cap` caps the router's scores.
    Experts that are not `gated` are down(activation(up(x))). With a `latent_size` the routed ones work in this width,
    between two projections, and the shared one does not (Nemotron 3). `limit` and `shared_limit` bound the factors of
    the experts' gated products (0: none). A table of `hashed` tokens, if not 0, names the experts of each token, and
    the router gives their weights alone (DeepSeek-V4).
    """

    hidden_size: int
    routing: Routing
    intermediate_size: int
    activation: Activation
    shared_intermediate_size: int = 0
    bias: bool = False
    correction: bool = False
    scale: float = 1.0
    norm: NormConfig | None = None
    zero_experts: int = 0
    dense: MLPConfig | None = None
    beside: NormConfig | None = None
    score_cap: float | None = None
    limit: float = 0.0
    shared_limit: float = 0.0
    gated: bool = True
    latent_size: int = 0
    hashed: int = 0

    @property
    def gathers(self) -> bool:
        return self.dense is not None and self.dense.gathers

    @property
    def carries(self) -> bool:
        return self.dense is not None and self.beside is None

    def check(self, index: int, where: str) -> None:
        if self.zero_experts >= self.routing.num_experts:
            raise ModelError(f"{where}: all of {self.routing.num_experts} experts return their input")
        width = max(self.intermediate_size, self.shared_intermediate_size)
        if self.routing.num_experts * width > MAX_EXPERTS_DIM:
            raise ModelError(f"{where}: num_experts x their width must be at most {MAX_EXPERTS_DIM}")
        if self.latent_size and (self.gated or self.bias or self.routing.shared):
            raise ModelError(
                f"{where}: experts in a latent width have no gates, no biases and no shared routes"
            )
        if self.beside is not None and self.dense is None:
            raise ModelError(f"{where}: there is no MLP beside the mixture")
        if self.hashed and (self.correction or self.routing.sparse_mixer):
            raise ModelError(f"{where}: a table chooses the experts, and so does the router")

    def columns(self, whole_experts: bool) -> list[int]:
        found = [] if self.dense is None else self.dense.columns(whole_experts)
        found += [] if whole_experts else [self.intermediate_size]
        return found + ([self.shared_intermediate_size] if self.shared_intermediate_size else [])

    def messages(self, shard: Shard) -> list[int]:
        found, division, d = list[int](), self.division(shard), self.hidden_size
        if division != "copy":
            found.append(len(shard.columns(d)) if division == "rows" else d)
        return found + ([] if self.dense is None else self.dense.messages(shard))

    def make(self, source: WeightSource, path: str, shard: Shard) -> Mixture:
        return Mixture(self, source, path, shard)

    def division(self, shard: Shard) -> Division:
        """How the mixture is divided among ranks."""
        if shard.whole_experts and not shard.whole:
            return "experts"
        if not shard.gathers:
            return "parts"
        return "copy" if self.zero_experts or self.latent_size else "rows"

    def experts(self, shard: Shard) -> range:
        """The routed experts that a rank has, or has a part of.

        The first rank has those that return their input, unless all ranks have all, or they too are spread.
        """
        count, division = self.routing.num_experts, self.division(shard)
        if division == "experts":
            return even(count, shard.size)[shard.rank]
        return range(count if shard.first or division == "copy" else count - self.zero_experts)


class Mixture:
    """The sum of a token's experts. The shared expert is the last."""

    def __init__(self, config: MixtureConfig, source: WeightSource, path: str, shard: Shard) -> None:
        self.config, self._source, self._path, self._shard = config, source, f"{path}.mixture", shard
        self._dense = None if config.dense is None else MLP(config.dense, source, f"{path}.mlp", shard)
        path = self._path
        self._division = config.division(shard)
        d, routing, scored = config.hidden_size, config.routing, config.routing.num_experts
        count, own = scored - config.zero_experts, config.experts(shard)
        router = [matrix_of(f"{path}.router", scored, d)]
        if routing.shared_gate:
            router.append(matrix_of(f"{path}.shared_gate", 1, d))
        experts: list[Expert | None] = []
        silent = None if len(own) == scored else self._silent_expert()
        for e in range(scored):
            if e not in own:
                experts.append(silent)
            else:
                experts.append(self._expert(f"{path}.experts.{e}", False) if e < count else None)
        shared = self._expert(f"{path}.shared", True) if config.shared_intermediate_size else None
        self._latent = _Latent(config, source, path, shared) if config.latent_size else None
        if shared is not None and self._latent is None:
            experts.append(shared)
        self.experts = tuple(experts)
        self.router = Linear(source, f"{path}.router", router, use="exact")
        if config.bias:
            self.router.bias = read_vector(source, f"{path}.router.bias", count)
        self._correction = None
        self._table: Matrix | None = None
        if config.hashed:
            table = Piece(f"{path}.table", (config.hashed, routing.top_k))
            self._table = source.matrix(f"{path}.table", [table], "numbers")
        if config.correction:
            self._correction = read_vector(source, f"{path}.correction", scored)
        self._norm = None if config.norm is None else Norm(config.norm, source, f"{path}.norm", d)
        self._beside = None if config.beside is None else _Beside(config.beside, source, path, d, scored)
        del self._source  # all is read

    def compute(self, r: Recording, x: Value, stream: Value) -> tuple[Value, Output | None]:
        g, dense = r.g, self._dense
        if dense is None:
            return self(g, x), None
        if self._beside is not None:
            y, routed = dense.out(g, dense(g, x)), self(g, stream)
            return g(Add(self._beside.mlp_norm(g, y), routed)), None
        r.carried.append(self(g, x))
        return dense(g, x), dense.out

    def __call__(self, g: Recorder, x: Value) -> Value:
        """The experts of x, or with `beside` of the residual stream."""
        config, beside, routing = self.config, self._beside, self.config.routing
        scores = self.router(g, x if beside is None else beside.router_norm(g, x))
        if config.score_cap is not None:
            scores = g(Scale(scores, 1.0, config.score_cap))
        scales = None if beside is None else beside.expert_scales
        ids = None if self._table is None else g(Embed(self._table))
        routes = g(Route(scores, routing, self._correction, scales, ids))
        x = x if beside is None else beside.norm(g, x)
        inner = x if self._latent is None else self._latent.down(g, x)
        y = g(RunExperts(inner, routes, self.experts, config.activation, routing.weigh_inputs))
        y = y if self._latent is None else self._latent(g, x, y)
        if self._division == "rows":
            y = self._shard.gather(g, y, self._shard.widths(config.hidden_size))
        elif self._division != "copy":
            y = self._shard.sum(g, y)
        if config.scale != 1.0:
            y = g(Scale(y, config.scale))
        return y if self._norm is None else self._norm(g, y)

    def _expert(self, path: str, shared: bool) -> Expert:
        config, shard, division, source = self.config, self._shard, self._division, self._source
        d = config.hidden_size if shared else config.latent_size or config.hidden_size
        inner = config.shared_intermediate_size if shared else config.intermediate_size
        divided = division == "parts" or (division == "experts" and shared)
        own = shard.columns(inner) if divided and not shard.whole else None
        rows, bias = shard.columns(d) if division == "rows" else None, config.bias and not shared
        gate, up = (matrix_of(f"{path}.{name}", inner, d, own) for name in ("gate", "up"))
        both: GatedWeight | Linear
        if config.gated:
            both = GatedWeight(source, f"{path}.gate_up", gate, up, bias)
        else:
            both = Linear(source, f"{path}.gate_up", [up], bias)
        down_bias = bias and (division != "parts" or shard.first)
        piece = matrix_of(f"{path}.down", d, inner, rows, None if division == "rows" else own)
        down = Linear(source, f"{path}.down", [piece], down_bias)
        limit = config.shared_limit if shared else config.limit
        return Expert(both.weight, both.bias, down.weight, down.bias, limit, path)

    def _silent_expert(self) -> Expert:
        """Stands for an expert that another rank has: its output is zero."""
        d, path = self.config.latent_size or self.config.hidden_size, f"{self._path}.silent"
        inner, out = Piece("", (PANEL, d), fill=0.0), Piece("", (d, PANEL), fill=0.0)
        up = self._source.gated(f"{path}.gate_up", inner, inner)
        return Expert(up, None, self._source.matrix(f"{path}.down", [out]), None)


class _Latent:
    """Projections to the width of the routed experts and back. The shared expert works beside them."""

    def __init__(self, config: MixtureConfig, source: WeightSource, path: str, shared: Expert | None) -> None:
        d, inner = config.hidden_size, config.latent_size
        self.down = Linear.plain(source, f"{path}.latent_down", inner, d)
        self._up = Linear.plain(source, f"{path}.latent_up", d, inner)
        self._shared, self._activation = shared, config.activation

    def __call__(self, g: Recorder, x: Value, routed: Value) -> Value:
        y, shared = self._up(g, routed), self._shared
        if shared is None:
            return y
        inner = g(ops.Linear(x, shared.up, None, self._activation, None, f"{shared.path}.gate_up"))
        return g(ops.Linear(inner, shared.down, None, None, y, f"{shared.path}.down"))


class _Beside:
    """Norms before the router, before the experts, and after the MLP; and the scales of the experts' weights."""

    def __init__(self, config: NormConfig, source: WeightSource, path: str, d: int, count: int) -> None:
        scale = read_vector(source, f"{path}.router_scale", d)
        operand = NormOperand(config.kind, scale * np.float32(d**-0.5), None, config.eps)
        self._router_norm = operand
        self.norm = Norm(config, source, f"{path}.experts_norm", d)
        self.mlp_norm = Norm(config, source, f"{path}.mlp_norm", d)
        self.expert_scales = read_vector(source, f"{path}.expert_scales", count)

    def router_norm(self, g: Recorder, x: Value) -> Value:
        return g(Normalize(x, self._router_norm))
