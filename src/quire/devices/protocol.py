"""What a backend offers: weights, a KV cache, executables of a graph and a sampler.

Knows arrays and shapes; knows no model family and no scheduler. A model is recorded once as a list of operations
(ops.py, graph.py); a backend gets the list. The reference and torch compute it one by one, the native backend encodes
it as a plan and replays that each step.

Shape letters: T tokens of the step, B sequences, L rows that need logits, D hidden size, N query heads,
G key/value heads, H head_dim, V vocabulary, S slots, M blocks per sequence, O and K rows and columns of a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.devices.choices import Choices
from quire.devices.elementwise import GELU, XIELU, Clamp, ColumnScale, SparseGELU, Temperature
from quire.devices.graph import Graph
from quire.devices.kv import FP8_MOST, KVDtype, KVLayer, KVScales, KVSpec, StateSpec
from quire.devices.operands import Activation, Attention, Expert, Matrix, Norm, NormKind, Rope, Routing
from quire.devices.peers import Peers
from quire.devices.sampling import Logits, Sampler
from quire.weights.layouts import AnyLayout
from quire.weights.schemes import WeightType
from quire.weights.tensor import Array, FloatArray, FloatDtype, QuantTensor

if TYPE_CHECKING:
    from quire.devices.adapters import Adapter
    from quire.devices.hidden import HiddenRows

# What others import from here, too.
__all__ = [
    "FP8_MOST", "GELU", "XIELU", "Activation", "Array", "Attention", "Clamp", "ColumnScale", "Expert", "FloatArray",
    "FloatDtype", "Graph", "KVDtype", "KVLayer", "KVScales", "KVSpec", "Matrix", "Norm", "NormKind", "Peers", "Rope",
    "Routing", "SparseGELU", "StateSpec", "Temperature", "WeightType",
]  # fmt: skip

IntArray = NDArray[np.int32]

Arithmetic = Literal["fp32", "bf16", "int8"]


class KVCache(Protocol):
    """Paged storage. A block holds `block_size` tokens of every layer.

    If `spec` is `apart`, the cache has memory for the whole blocks that it was made for, more ids than that, and each
    block is placed in slabs before it is used. A slab may be in several blocks, of which one is in use.
    """

    @property
    def spec(self) -> KVSpec: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    def place_blocks(self, rows: Sequence[Sequence[int]]) -> None:
        """Place blocks, in order: each row is a block and the slab of each of its columns (KVSpec.columns)."""

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) of every layer, in order."""

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole rows of states (source, destination), open rows too, in order."""


class StateInput(msgspec.Struct, frozen=True):
    """Where the states of a step's sequences are (recurrent_ops.py); all arrays are C-contiguous int32.

    Sequence b has row rows_B[b] of the cache's states. That row holds the state before its first open_B[b] positions
    that this step does not compute: their inputs are in its open rows, from which the state is advanced first. The
    state then takes in the first kept_B[b] of its tokens in the step; the inputs of the others, which may be taken
    back, become its open rows. `marks` are (sequence, count, row), in this order: the state after `count` <= kept of
    its tokens in the step is also written to `row`. A sequence that has no state yet starts from zeros.
    """

    rows_B: IntArray
    open_B: IntArray
    kept_B: IntArray
    marks_M3: IntArray


class ModelInput(msgspec.Struct, frozen=True):
    """One ragged step; all arrays are C-contiguous int32.

    Sequence b owns tokens cu_q[b]..cu_q[b+1]-1 at consecutive positions ending at kv_len[b]-1; its block table
    is row slots[b] of `block_table`. Token at position p lives in block table[p // block_size], offset
    p % block_size. `logit_rows` are indices into the T tokens.

    `greedy`: only the largest of each row's logits is needed; a backend that finds it may leave the others undefined.

    `hidden_TD` is the output of the previous stage: float32 and C-contiguous, the device's own rows, or
    what they come over (exchanges.StageLink). None if the graph has the first layer.
    `adapters_B` is the slot of each sequence's adapter (Executable.adapt), -1 for none. None: no sequence has one.
    `states`: None if the model has none. `unseen_U2` are places among the T tokens, each with a slot: the device
    takes the last token that its sampler drew for the slot. None: all tokens are here. `appended_C3` are the changes of
    the block table since the last step, (slot, column, block), for a device that keeps the table; None: it is whole.
    """

    tokens_T: IntArray
    positions_T: IntArray
    cu_q_B1: IntArray
    kv_len_B: IntArray
    slots_B: IntArray
    block_table_SM: IntArray
    logit_rows_L: IntArray
    greedy: bool = False
    hidden_TD: HiddenRows | None = None
    adapters_B: IntArray | None = None
    states: StateInput | None = None
    unseen_U2: IntArray | None = None
    appended_C3: IntArray | None = None


class Limits(msgspec.Struct, frozen=True):
    """The largest step that an executable must support: tokens, sequences, rows of logits at a time, adapter slots."""

    max_tokens: int
    max_seqs: int
    max_logit_rows: int
    max_adapters: int = 0
    graphs: tuple[int, ...] = ()  # as in Choices


class Executable(Protocol):
    """A forward pass ready to run, bound to one KV cache."""

    def run(self, inputs: ModelInput) -> Logits:
        """Compute the step and write its KV. Returns the first min(L, max_logit_rows) rows; L may be 0."""

    def logits(self, start: int, stop: int) -> Logits:
        """Return the logits of logit rows start..stop-1 of the last run, for L above max_logit_rows."""

    def hidden(self) -> HiddenRows:
        """Return rows [L, D]: final hidden states of the last run (after the last norm, before the head).

        For a graph without a head, [T, D]: the next stage's input. They may be views, valid until the next `run`.
        """

    def adapt(self, slot: int, adapter: Adapter | None) -> int:
        """Put an adapter into a slot, or empty it, from the next run on; returns the bytes that it takes.

        May be called from any thread. EngineError if the adapter changes what the graph does not compute.
        """

    def taps(self) -> tuple[HiddenRows, ...]:
        """Return rows [T, D]: hidden states after the layers Graph.taps, in order; they may be views as in `hidden`."""


@runtime_checkable
class Prepares(Protocol):
    # An executable that does a piece of what later steps would wait for; False if nothing is left.
    def prepare(self, block_table_SM: IntArray) -> bool: ...


class MachineLimits(msgspec.Struct, frozen=True):
    """Measured limits of a device: reading memory in GB/s, and products of one arithmetic in GFLOP/s."""

    read_gbs: float
    peak_gflops: float
    arithmetic: Arithmetic
    threads: int


class WeightPacker(Protocol):
    """What makes weights: the part of a backend that loaders know."""

    @property
    def fingerprint(self) -> str:
        """Identifies all that exported weights depend on. Weights of another fingerprint must not be restored."""

    def matrix(self, parts: Sequence[Array | QuantTensor], dtype: WeightType) -> Matrix:
        """Pack weights [O_i, K], stacked on O.

        Floats (float32, float16 or bfloat16; may be memory-mapped) are rounded to `dtype`. Quantized tensors must have
        its layout and are kept bit for bit.
        """

    def head(self, parts: Sequence[Array | QuantTensor], dtype: WeightType) -> Matrix:
        """Pack like `matrix`, for the weight of the logits: may add data that speeds up finding the largest output."""

    def gated_matrix(self, gate: Array | QuantTensor, up: Array | QuantTensor, dtype: WeightType) -> Matrix:
        """Pack a gate and an up projection [I, K] for `gated_linear`: shape [2 I, K]."""

    def takes(self, layout: AnyLayout) -> bool:
        """Tell whether `matrix` packs quantized tensors of this layout. Others must be passed as floats."""

    def export(self, matrix: Matrix) -> tuple[dict[str, Any], Array]:
        """Return a description (plain values) and the packed bytes [nbytes] uint8 as they lie in memory."""

    def restore(self, about: dict[str, Any], data: Array) -> Matrix:
        """Make the matrix that `export` described, in place in `data`, 64-byte aligned. ModelError if they disagree."""


class Backend(WeightPacker, Protocol):
    """One kind of hardware: makes weights, caches, executables and samplers, and describes its abilities."""

    @property
    def name(self) -> str:
        """Name it for logs and reports, for example 'native avx512, 2 threads'."""

    @property
    def caveat(self) -> str:
        """Return a warning about models on this backend, completing "MODEL ..."; empty if there is none."""

    @property
    def threads(self) -> int:
        """Return the number of host threads that compute."""

    @property
    def choices(self) -> Choices:
        """Return what the device decides unless options do."""

    def outline(self) -> Backend:
        """Return this backend for planning: its weights have shapes but no values, and its executables cannot run."""

    @property
    def places_blocks(self) -> bool:
        """Tell whether its caches may have windowed layers apart (KVSpec.apart)."""

    def kv_cache(
        self, spec: KVSpec, num_blocks: int, block_size: int, num_states: int = 0, num_open: int = 0
    ) -> KVCache:
        """Make a cache of blocks, and of rows of states with `num_open` open rows each."""

    def compile(self, graph: Graph, kv: KVCache, limits: Limits) -> Executable: ...

    def sampler(self, vocab_size: int) -> Sampler:
        """Return a sampler of the logits that this backend's executables return."""

    def workspace_bytes(self, graph: Graph, kv_spec: KVSpec, limits: Limits) -> int:
        """Memory that `compile` will take, logits included, computed before anything is allocated."""

    def free_memory(self) -> int:
        """Count the bytes that weights, KV cache and workspace can still take.

        What nothing uses any more is given back first, to other processes too.
        """

    def arithmetic(self, weight: WeightType) -> Arithmetic:
        """Return the arithmetic of products with such a weight."""

    def measure_limits(self, arithmetic: Arithmetic) -> MachineLimits:
        """Measure the device now, in well under a second.

        `arithmetic` of the result is the one measured: fp32 where the device lacks the one asked for.
        """
