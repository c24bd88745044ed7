"""The MLP or mixture of experts of a layer, from tensor names to weights."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from quire.devices.protocol import XIELU, Array, Expert, FloatArray, Norm
from quire.model.assemble_parts import PartAssembly
from quire.model.shard import PANEL
from quire.model.spec import MoESpec
from quire.model.weights import BesideWeights, MLPWeights, MoEWeights
from quire.weights.parts import Part, Take, part, row_range


class MLPAssembly(PartAssembly):
    """Assembles MLPs and mixtures."""

    def mlp(self, i: int, layer: str) -> MLPWeights:
        """The MLP of layer `i`, whose tensors begin with `layer`."""
        spec, names = self.spec, self.names
        d, inner, bias = spec.hidden_size, spec.shape(i).intermediate_size, spec.mlp_bias
        own = self.shard.columns(inner)
        mine = row_range(own.start, own.stop)
        apart = None
        if spec.gate_cutoff(i) is not None:
            gate, other = layer + names.gate, layer + names.up
            apart, up = (self.source.matrix([self._linear(name, inner, d, mine)]) for name in (gate, other))
            up_bias = None
        elif not spec.gated:
            up = self.source.matrix([self._linear(layer + names.up, inner, d, mine)])
            up_bias = self._bias(bias, (layer + names.up, inner, mine))
        elif names.gate_up is None:
            gate, other = layer + names.gate, layer + names.up
            up = self.source.gated(self._linear(gate, inner, d, mine), self._linear(other, inner, d, mine))
            up_bias = self._bias(bias, (gate, inner, mine), (other, inner, mine))
        else:
            module = layer + names.gate_up
            first = row_range(own.start, own.stop)
            second = row_range(inner + own.start, inner + own.stop)
            up = self.source.gated(
                self._linear(module, 2 * inner, d, first), self._linear(module, 2 * inner, d, second)
            )
            up_bias = self._bias(bias, (module, 2 * inner, first), (module, 2 * inner, second))
        return MLPWeights(
            up=up,
            up_bias=up_bias,
            xielu=self._xielu(layer + names.xielu) if spec.xielu else None,
            down_norm=self._norm(layer + names.down_norm, inner) if spec.inner_norms else None,
            down=self.source.matrix([self._output(self._linear(layer + names.down, d, inner), own)]),
            down_bias=self._output_bias(bias, f"{layer}{names.down}.bias"),
            gate=apart,
        )

    def _xielu(self, name: str) -> XIELU:
        """The checkpoint stores the parameters before a softplus, which keeps them positive."""
        alpha_p, alpha_n = (self._vector(f"{name}.{key}", 1) for key in ("alpha_p", "alpha_n"))
        beta, eps = (
            self.source.vector([part(f"{name}.{key}", (), np.atleast_1d)]) for key in ("beta", "eps")
        )
        softplus = [float(np.logaddexp(0.0, np.float64(alpha[0]))) for alpha in (alpha_p, alpha_n)]
        return XIELU(softplus[0], float(beta[0]) + softplus[1], float(beta[0]), float(eps[0]))

    def moe(self, i: int, layer: str, moe: MoESpec) -> MoEWeights:
        """The mixture of experts of layer `i`, whose tensors begin with `layer`."""
        names, d = self.names, self.spec.hidden_size
        scored, inner = moe.routing.num_experts, moe.intermediate_size
        count = scored - moe.zero_experts
        router = [part(f"{layer}{names.router}.weight", (scored, d))]
        if moe.routing.shared_gate:
            router.append(part(f"{layer}{names.shared_gate}.weight", (1, d)))
        modules, own = (names.expert_gate, names.expert_up, names.expert_down), self.shard.experts(self.spec)
        silent = None if len(own) == scored else self._silent_expert()
        experts: list[Expert | None] = []
        for e in range(scored):
            if e not in own:
                experts.append(silent)
            elif e >= count:
                experts.append(None)
            elif names.expert_stack:
                experts.append(self._stacked_expert(layer, moe, e))
            else:
                experts.append(self._expert(layer + names.experts.format(e=e), inner, modules, moe.bias))
        if moe.limits is not None:
            experts = [None if one is None else replace(one, limit=moe.limits[i]) for one in experts]
        if moe.routing.shared:
            shared = self._shared_expert(layer + names.shared, moe.shared_intermediate_size)
            experts.append(replace(shared, limit=self.spec.gate_limit(i)))
        return MoEWeights(
            router=self.source.matrix(router, "exact"),
            router_bias=self._bias(moe.bias, (layer + names.router, count, None)),
            correction=self._correction(layer + names.correction, scored) if moe.correction else None,
            experts=tuple(experts),
            norm=self._norm(layer + names.moe_norm) if moe.norm else None,
            beside=self._beside(layer, scored) if moe.beside else None,
        )

    def _beside(self, layer: str, count: int) -> BesideWeights:
        spec, names, d = self.spec, self.names, self.spec.hidden_size
        scale = self._vector(layer + names.router_scale, d) * np.float32(d**-0.5)
        return BesideWeights(
            router_norm=Norm(spec.norm, scale, None, spec.norm_eps),
            norm=self._norm(layer + names.moe_pre_norm),
            mlp_norm=self._norm(layer + names.mlp_beside_norm),
            expert_scales=self._vector(layer + names.expert_scales, count),
        )

    def _correction(self, name: str, count: int) -> FloatArray:
        if self.names.correction_row:
            return self.source.vector([part(name, (1, count), lambda array: array[0])])
        return self._vector(name, count)

    def _shared_expert(self, prefix: str, inner: int) -> Expert:
        names, d = self.names, self.spec.hidden_size
        if names.shared_gate_up is None:
            modules = names.expert_gate, names.expert_up, names.expert_down
            if names.expert_stack:
                modules = ("gate_proj", "up_proj", "down_proj")
            return self._expert(prefix, inner, modules, shared=True)
        whole, shape = f"{prefix}{names.shared_gate_up}.weight", (2 * inner, d)
        own = self.shard.expert_columns(self.spec, inner, shared=True)
        gate, other = part(whole, shape, row_range(0, inner)), part(whole, shape, row_range(inner, 2 * inner))
        down = self._expert_output(part(f"{prefix}{names.shared_down}.weight", (d, inner)), own)
        return Expert(
            self.source.gated(gate.cut(own), other.cut(own)), None, self.source.matrix([down]), None
        )

    def _silent_expert(self) -> Expert:
        """Stands for an expert that another rank has: its output is zero."""

        def zeros(out: int, width: int) -> Part:
            return Part((), lambda: np.zeros((out, width), np.float32), (out, width))

        d = self.spec.hidden_size
        up = self.source.gated(zeros(PANEL, d), zeros(PANEL, d))
        return Expert(up, None, self.source.matrix([zeros(d, PANEL)]), None)

    def _expert_output(self, whole: Part, columns: range) -> Part:
        """The last projection of an expert whose inner `columns` this rank has: [D, columns], or rows of it."""
        if self.shard.mixture(self.spec) == "rows":
            return whole.cut(self.shard.columns(self.spec.hidden_size))
        return whole.cut(columns=columns)

    def _expert_output_bias(self, whole: Part) -> FloatArray | None:
        kind = self.shard.mixture(self.spec)
        if kind == "rows":
            whole = whole.cut(self.shard.columns(self.spec.hidden_size))
        return self.source.vector([whole]) if kind != "parts" or self.shard.first else None

    def _expert(
        self,
        prefix: str,
        inner: int,
        modules: tuple[str, str, str],
        bias: bool = False,
        shared: bool = False,
    ) -> Expert:
        d, (gate_name, up_name, down_name) = self.spec.hidden_size, modules
        own = self.shard.expert_columns(self.spec, inner, shared)
        mine = row_range(own.start, own.stop)
        gate = part(f"{prefix}{gate_name}.weight", (inner, d)).cut(own)
        up = part(f"{prefix}{up_name}.weight", (inner, d)).cut(own)
        down = self._expert_output(part(f"{prefix}{down_name}.weight", (d, inner)), own)
        both = (prefix + gate_name, inner, mine), (prefix + up_name, inner, mine)
        return Expert(
            self.source.gated(gate, up),
            self._bias(bias, *both),
            self.source.matrix([down]),
            self._expert_output_bias(part(f"{prefix}{down_name}.bias", (d,))) if bias else None,
        )

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

        gate_up, down, own = (
            names.expert_up,
            names.expert_down,
            self.shard.expert_columns(self.spec, inner),
        )
        if names.expert_gate_apart:
            gate, up = (matrix(name, inner, d, 0, 1).cut(own) for name in (names.expert_gate_apart, gate_up))
        else:
            gate, up = (matrix(gate_up, 2 * inner, d, first, 2).cut(own) for first in (0, 1))
        biases = [bias(gate_up, 2 * inner, every_second(first)).cut(own) for first in (0, 1)]
        return Expert(
            self.source.gated(gate, up),
            self.source.vector(biases) if moe.bias else None,
            self.source.matrix([self._expert_output(matrix(down, d, inner, 0, 1), own)]),
            self._expert_output_bias(bias(down, d, lambda array: array[e])) if moe.bias else None,
        )
