"""The CPU backend: packs weights, records a graph once into a native plan, runs a step in one native call.

Knows `quire._native` and the Ops protocol; knows no model family and no scheduler. Kernels, layouts and the
plan itself are C++ (csrc/simd/kernels.h and csrc/plan/plan.h tell how).
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np

from quire import _native
from quire.devices.host import HostLogits
from quire.devices.protocol import (
    GROUPS_OF_INT4,
    Activation,
    Array,
    Attention,
    Expert,
    FloatArray,
    Graph,
    IntArray,
    KVCache,
    KVSpec,
    Limits,
    Matrix,
    ModelInput,
    Norm,
    Quantized,
    Rope,
    Routing,
    WeightType,
)
from quire.errors import EngineError, ModelError

NONE = -1  # no tensor


class _EngineErrors:
    """The native module refuses with plain Python exceptions; callers know Quire's."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, (ValueError, IndexError, TypeError)):
            raise EngineError(str(error)) from error


_engine_errors = _EngineErrors()


def usable_threads() -> int:
    """Cores that this process may use: its CPU set, or its control group's quota where that is less."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min(cores, _cgroup_cores(Path("/sys/fs/cgroup"))))


def _cgroup_cores(root: Path) -> int:
    """The CPU quota under `root` (cgroup v2, then v1) in whole cores, rounded up; huge where there is none."""
    unlimited = 1 << 20
    try:
        if (root / "cpu.max").exists():
            quota, period = (root / "cpu.max").read_text().split()
        else:
            quota = (root / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu" / "cpu.cfs_period_us").read_text().strip()
        if quota == "max" or int(quota) <= 0 or int(period) <= 0:
            return unlimited
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # no control group, or a form this does not know: no limit
        return unlimited


def _source(array: Array) -> tuple[Array, str]:
    """An array the packer can read in place, and the type of its elements."""
    if array.ndim != 2:
        raise EngineError(f"a weight must have 2 dimensions, got shape {array.shape}")
    if not array.dtype.isnative or array.strides[1] != array.itemsize or array.strides[0] < 0:
        array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    if array.strides[0] % array.itemsize:
        array = array.copy()
    if array.dtype == ml_dtypes.bfloat16:
        return array.view(np.uint16), "bfloat16"
    if array.dtype in (np.float16, np.float32):
        return array, str(array.dtype)
    raise EngineError(f"a weight must be float32, float16 or bfloat16, got {array.dtype}")


class NativeMatrix:
    """A weight in panels of 16 rows (csrc/simd/kernels.h, MatrixView)."""

    def __init__(self, packed: Any, pool: Any) -> None:
        self.packed = packed
        self._pool = pool

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.packed.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        return int(self.packed.nbytes)

    @property
    def greedy_nbytes(self) -> int:
        return int(self.packed.screen_nbytes) or self.nbytes

    def dequantize(self) -> FloatArray:
        values: FloatArray = self.packed.dequantize(self._pool)
        return values


class NativeKVCache:
    """Paged keys and values in native memory (csrc/plan/kv_cache.h); pages come when first written."""

    def __init__(self, spec: KVSpec, num_blocks: int, block_size: int) -> None:
        self._spec, self._num_blocks, self._block_size = spec, num_blocks, block_size
        with _engine_errors:
            self.store = _native.KVStore(
                spec.num_layers,
                spec.num_kv_heads,
                spec.head_dim,
                spec.value_dim or 0,
                spec.dtype,
                num_blocks,
                block_size,
            )

    @property
    def spec(self) -> KVSpec:
        return self._spec

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def block_size(self) -> int:
        return self._block_size

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        if copies:
            pairs = np.array(copies, np.int32).reshape(-1, 2)
            with _engine_errors:
                self.store.copy_blocks(pairs[:, 0].copy(), pairs[:, 1].copy())


def _float_array(values: FloatArray | None) -> FloatArray | None:
    return None if values is None else np.ascontiguousarray(values, np.float32)


def _packed(weight: Matrix) -> Any:
    if not isinstance(weight, NativeMatrix):
        raise EngineError(
            f"the native backend got a weight of {type(weight).__name__}; load the model with it"
        )
    return weight.packed


def _shape_of(parts: Sequence[Array]) -> tuple[int, int]:
    group = 32 if parts[0].dtype in GROUPS_OF_INT4 else 1
    return sum(part.shape[0] for part in parts), parts[0].shape[1] * group


def _pack_groups(parts: Sequence[Array], gated: bool) -> Array:
    """Pack GROUPS_OF_INT4 into a weight's 64-byte aligned bytes (csrc/simd/kernels.h, MatrixView, i4, group 32)."""
    rows_OG = list(parts) if gated else [np.concatenate(parts)]
    panels = []
    for rows in rows_OG:
        padded = np.zeros((-(-len(rows) // 16) * 16, rows.shape[1]), rows.dtype)
        padded[: len(rows)] = rows
        panels.append(padded.reshape(-1, 16, rows.shape[1]).swapaxes(1, 2))  # [panel, G, 16]
    stacked = np.stack(panels, axis=1).reshape(-1, *panels[0].shape[1:])
    # Eight columns a step: four in low halves of bytes, four in high halves.
    quanta = stacked["quanta"].reshape(*stacked.shape, 4, 2, 4)
    halves = quanta[..., 0, :] | quanta[..., 1, :] << np.uint8(4)
    fields = [np.ascontiguousarray(stacked["scale"]).view(np.uint8)]
    if stacked.dtype == GROUPS_OF_INT4[1]:
        fields.append(np.ascontiguousarray(stacked["offset"]).view(np.uint8))
    fields.append(halves.swapaxes(2, 3).reshape(*stacked.shape[:2], -1))
    groups = np.concatenate(fields, axis=-1).reshape(-1)
    memory = np.empty(groups.nbytes + 63, np.uint8)
    start = -memory.ctypes.data % 64
    memory[start : start + groups.nbytes] = groups
    return memory[start : start + groups.nbytes]


# csrc/simd/kernels.h: layout, group, and these
Format = tuple[str, int, bool, bool, bool, bool]
FLAGS = ("offsets", "narrow", "int8_rows", "screened")


def _shape(about: dict[str, Any]) -> tuple[int, int, Format, bool]:
    """Rows, columns, format and whether gated: as `NativeBackend.export` describes a matrix."""
    try:
        offsets, narrow, int8_rows, screened = (bool(about[name]) for name in FLAGS)
        format = str(about["layout"]), int(about["group"]), offsets, narrow, int8_rows, screened
        return int(about["rows"]), int(about["cols"]), format, bool(about["gated"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"not the description of a packed weight: {about}") from error


def _norm_tuple(norm: Norm | None) -> tuple[bool, FloatArray, FloatArray | None, float, bool] | None:
    if norm is None:
        return None
    weight, bias = _float_array(norm.weight.reshape(-1)), norm.bias
    assert weight is not None
    bias = None if bias is None else _float_array(bias.reshape(-1))
    return norm.kind == "rms", weight, bias, float(norm.eps), norm.weight.ndim == 2


class _Recorder:
    """`Ops` whose tensors are numbers of buffers in a native plan: each call appends one op."""

    def __init__(self, plan: Any) -> None:
        self._plan = plan

    def embed(self, table: Matrix, scale: float = 1.0) -> int:
        return int(self._plan.embed(_packed(table), scale))

    def embed_positions(self, table: Matrix, offset: int) -> int:
        return int(self._plan.embed_positions(_packed(table), offset))

    def add(self, x: int, other: int, scale: float = 1.0) -> int:
        return int(self._plan.add(x, other, scale))

    def scale(self, x: int, scale: float, cap: float | None = None) -> int:
        return int(self._plan.scale(x, scale, cap or 0.0))

    def norm(self, x: int, norm: Norm) -> int:
        return int(self._plan.norm(x, _norm_tuple(norm)))

    def linear(
        self,
        x: int,
        weight: Matrix,
        bias: FloatArray | None = None,
        activation: Activation | None = None,
        residual: int | None = None,
    ) -> int:
        packed = _packed(weight)
        if packed.gated:
            raise EngineError("a gated weight is for gated_linear")
        added = NONE if residual is None else residual
        return int(self._plan.linear(x, packed, _float_array(bias), activation or "", added))

    def gated_linear(
        self, x: int, weight: Matrix, activation: Activation, bias: FloatArray | None = None
    ) -> int:
        packed = _packed(weight)
        if not packed.gated:
            raise EngineError("gated_linear needs a weight made by gated_matrix")
        return int(self._plan.linear(x, packed, _float_array(bias), activation, NONE))

    def rope_angles(self, rope: Rope) -> int:
        return int(self._plan.rope(np.ascontiguousarray(rope.inv_freq, np.float32), rope.scale))

    def store_kv(
        self,
        qkv: int,
        layer: int,
        num_heads: int,
        angles: int | None,
        q_norm: Norm | None,
        k_norm: Norm | None,
    ) -> int:
        rotation = NONE if angles is None else angles
        norms = _norm_tuple(q_norm), _norm_tuple(k_norm)
        return int(self._plan.store_kv(qkv, layer, num_heads, rotation, *norms))

    def store_latent(self, kv: int, q_latent: int, q_rope: int, layer: int, angles: int, norm: Norm) -> int:
        return int(self._plan.store_latent(kv, q_latent, q_rope, layer, angles, _norm_tuple(norm)))

    def head_linear(self, x: int, weights: Sequence[Matrix]) -> int:
        return int(self._plan.head_linear(x, [_packed(weight) for weight in weights]))

    def route(self, scores: int, routing: Routing, correction: FloatArray | None = None) -> int:
        params = _native.Routing(
            routing.num_experts,
            routing.top_k,
            routing.scoring == "sigmoid",
            routing.softmax_after,
            routing.renormalize,
            routing.scale,
            routing.num_groups,
            routing.top_groups,
            routing.group_sum,
            _float_array(correction),
            routing.shared,
            routing.shared_gate,
        )
        return int(self._plan.route(scores, params))

    def experts(self, x: int, routes: int, experts: Sequence[Expert], activation: Activation) -> int:
        weights = [
            (_packed(e.up), _float_array(e.up_bias), _packed(e.down), _float_array(e.down_bias))
            for e in experts
        ]
        return int(self._plan.experts(x, routes, weights, activation))

    def attention(self, q: int, layer: int, num_heads: int, attention: Attention) -> int:
        return int(
            self._plan.attention(
                q,
                layer,
                num_heads,
                attention.scale,
                attention.window or 0,
                attention.chunk or 0,
                attention.ahead,
                attention.cap or 0.0,
                _float_array(attention.slopes),
                _float_array(attention.sinks),
            )
        )

    def select_rows(self, x: int) -> int:
        return int(self._plan.select_rows(x))


class NativeExecutable:
    """A finished plan bound to a cache. One step at a time; views are overwritten by the next call."""

    def __init__(self, plan: Any, cache: NativeKVCache, limits: Limits) -> None:
        self._plan, self._limits = plan, limits
        with _engine_errors:
            plan.bind(cache.store)
        self._logits: FloatArray = plan.logits_view()
        self._hidden: FloatArray = plan.hidden_view()
        self._best: IntArray | None = plan.best_view()

    def run(self, inputs: ModelInput) -> HostLogits:
        with _engine_errors:
            self._plan.run(
                inputs.tokens_T,
                inputs.positions_T,
                inputs.cu_q_B1,
                inputs.kv_len_B,
                inputs.slots_B,
                inputs.block_table_SM,
                inputs.logit_rows_L,
                inputs.greedy,
            )
        return self._rows(min(len(inputs.logit_rows_L), self._limits.max_logit_rows))

    def logits(self, start: int, stop: int) -> HostLogits:
        with _engine_errors:
            self._plan.head(start, stop)
        return self._rows(stop - start)

    def hidden(self) -> FloatArray:
        return self._hidden[: self._plan.num_logit_rows]

    def _rows(self, count: int) -> HostLogits:
        return HostLogits(self._logits[:count], None if self._best is None else self._best[:count])


class NativeBackend:
    """C++ kernels on the CPU. `threads` None: all cores the process may use; `isa` as in DeviceConfig.

    `compact`: bfloat16 weights are held in 12 bits without loss (csrc/linear/compact.h), by default where the set has
    instructions to expand them. `screened`: a head of float32 or bfloat16 has a copy in int8 behind it, by which greedy
    steps find where the largest logit may be (csrc/linear/screen.h). Results are the same bits.
    """

    def __init__(
        self,
        threads: int | None = None,
        isa: str = "auto",
        compact: bool | None = None,
        screened: bool = True,
    ) -> None:
        if threads is not None and threads < 1:
            raise EngineError(f"threads must be at least 1, got {threads}")
        with _engine_errors:
            self.isa: str = _native.resolve_isa(isa)
        self.compact = self.isa.startswith("avx") if compact is None else compact
        self.screened = screened
        self.pool = _native.ThreadPool(usable_threads() if threads is None else threads)

    @property
    def threads(self) -> int:
        return int(self.pool.threads)

    @property
    def name(self) -> str:
        return f"native {self.isa}, {self.threads} thread{'' if self.threads == 1 else 's'}"

    def matrix(self, parts: Sequence[Array], dtype: WeightType) -> NativeMatrix:
        return self._pack(parts, self._format(dtype), gated=False)

    def head(self, parts: Sequence[Array], dtype: WeightType) -> NativeMatrix:
        return self._pack(parts, self._format(dtype, head=True), gated=False)

    def gated_matrix(self, gate: Array, up: Array, dtype: WeightType) -> NativeMatrix:
        return self._pack((gate, up), self._format(dtype), gated=True)

    @property
    def fingerprint(self) -> str:
        return f"{platform.machine()} {self.isa}"

    def export(self, matrix: Matrix) -> tuple[dict[str, Any], Array]:
        packed = _packed(matrix)
        rows, columns = packed.shape
        layout, group, *flags = packed.format
        about = {"rows": rows, "cols": columns, "layout": layout, "gated": packed.gated, "group": group}
        return about | dict(zip(FLAGS, flags, strict=True)), packed.bytes()

    def restore(self, about: dict[str, Any], data: Array) -> NativeMatrix:
        try:
            return NativeMatrix(_native.packed(*_shape(about), data), self.pool)
        except (ValueError, TypeError) as error:
            raise ModelError(f"a packed weight cannot be used: {error}") from error

    def kv_cache(self, spec: KVSpec, num_blocks: int, block_size: int) -> NativeKVCache:
        return NativeKVCache(spec, num_blocks, block_size)

    def compile(self, graph: Graph, kv: KVCache, limits: Limits) -> NativeExecutable:
        if not isinstance(kv, NativeKVCache):
            raise EngineError(f"the native backend got a KV cache of {type(kv).__name__}")
        return NativeExecutable(self._record(graph, kv.spec, limits), kv, limits)

    def workspace_bytes(self, graph: Graph, kv_spec: KVSpec, limits: Limits) -> int:
        return int(self._record(graph, kv_spec, limits).workspace_bytes)

    def _pack(self, parts: Sequence[Array], format: Format, gated: bool) -> NativeMatrix:
        if parts and parts[0].dtype in GROUPS_OF_INT4:
            rows, columns = _shape_of(parts)
            data = _pack_groups(parts, gated)
            with _engine_errors:
                packed = _native.packed(rows, columns, format, gated, data)
            return NativeMatrix(packed, self.pool)
        sources = [_source(part) for part in parts]
        with _engine_errors:
            packed = _native.pack(sources, format, gated, self.isa, self.pool)
        return NativeMatrix(packed, self.pool)

    def _format(self, dtype: WeightType, head: bool = False) -> Format:
        if isinstance(dtype, Quantized):
            narrow = dtype.bits == 4 and dtype.scales == "bfloat16"
            return f"int{dtype.bits}", dtype.group_size, not dtype.symmetric, narrow, dtype.int8_rows, False
        layout = "bfloat16_12" if self.compact and dtype == "bfloat16" else dtype
        return layout, 0, False, False, False, head and self.screened

    def outline(self) -> OutlineBackend:
        """The same backend for planning: its weights have a shape and no values, and take no memory."""
        return OutlineBackend(self.threads, self.isa, self.compact, self.screened)

    def _record(self, graph: Graph, kv_spec: KVSpec, limits: Limits) -> Any:
        with _engine_errors:
            plan = _native.Plan(
                self.isa,
                self.pool,
                kv_spec.num_layers,
                kv_spec.num_kv_heads,
                kv_spec.head_dim,
                kv_spec.value_dim or 0,
                limits.max_tokens,
                limits.max_seqs,
                limits.max_logit_rows,
            )
            recorder = _Recorder(plan)
            head_input = plan.begin_head(graph.hidden(recorder))
            logits = graph.head(recorder, head_input)
            if plan.width(logits) != graph.vocab_size:
                raise EngineError(
                    f"the head gives {plan.width(logits)} logits, the graph says {graph.vocab_size}"
                )
            plan.finish(logits)
        return plan


class OutlineBackend(NativeBackend):
    """Records plans of models that are not loaded. What it compiles cannot run."""

    def _pack(self, parts: Sequence[Array], format: Format, gated: bool) -> NativeMatrix:
        rows, columns = _shape_of(parts)
        with _engine_errors:
            return NativeMatrix(_native.outline(rows, columns, format, gated), self.pool)

    def restore(self, about: dict[str, Any], data: Array) -> NativeMatrix:
        return NativeMatrix(_native.outline(*_shape(about)), self.pool)
