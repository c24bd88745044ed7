"""A backend's offer to the decoder: weights, a KV cache, and a small set of operations.

Knows arrays and shapes; knows no model family and no scheduler. The decoder is written once against `Ops`:
the reference backend executes each call at once on numpy arrays, the native backend records the calls into
a plan and replays it each step.

Shape letters: T tokens of the step, B sequences, L rows that need logits, D hidden size, N query heads,
G key/value heads, H head_dim, V vocabulary, S slots, M blocks per sequence, O and K rows and columns of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.devices.adapters import Adapter
from quire.devices.elementwise import GELU as GELU
from quire.devices.elementwise import XIELU as XIELU
from quire.devices.elementwise import Clamp as Clamp
from quire.devices.elementwise import ColumnScale as ColumnScale
from quire.devices.elementwise import Elementwise as Elementwise
from quire.devices.elementwise import SparseGELU as SparseGELU
from quire.devices.elementwise import Temperature as Temperature
from quire.devices.kv import FP8_MOST as FP8_MOST
from quire.devices.kv import KVDtype as KVDtype
from quire.devices.kv import KVLayer as KVLayer
from quire.devices.kv import KVScales as KVScales
from quire.devices.kv import KVSpec as KVSpec
from quire.devices.operands import Attention as Attention
from quire.devices.operands import Norm as Norm
from quire.devices.operands import NormKind as NormKind
from quire.devices.operands import Rope as Rope
from quire.devices.peers import Peers as Peers
from quire.devices.sampling import Logits, Sampler
from quire.weights.layouts import AnyLayout
from quire.weights.schemes import WeightType as WeightType
from quire.weights.tensor import Array as Array
from quire.weights.tensor import FloatArray as FloatArray
from quire.weights.tensor import FloatDtype as FloatDtype
from quire.weights.tensor import QuantTensor

IntArray = NDArray[np.int32]

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "softplus", "clamped_swiglu"]
Arithmetic = Literal["fp32", "bf16", "int8"]


@runtime_checkable
class Matrix(Protocol):
    """A weight [O, K] packed for a backend's kernels."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def greedy_nbytes(self) -> int:
        """Approximate bytes read to find the largest output of a row; can be below `nbytes` for a `Backend.head`."""

    def dequantize(self) -> FloatArray:
        """The weight as float32 [O, K], in the row order in which `Backend.matrix` received it."""


class Routing(msgspec.Struct, frozen=True):
    """How a token chooses experts from its scores [E]; `correction` [E] affects the choice, not the weights.

    Scores go through a sigmoid or a softmax (over all experts, or with `softmax_after` over the chosen ones). With
    `num_groups`, only experts of the `top_groups` best groups can be chosen; a group is as good as its best expert,
    or with `group_sum` as its two best together. A `shared` expert, the last one, always takes part; its weight is 1,
    or with `shared_gate` the sigmoid of one extra score. The weights multiply the experts' outputs, or with
    `weigh_inputs` their inputs. With `correct_logits` the correction is added to the scores themselves, and the
    choice uses that sum. `sparse_mixer`, if not 0, is the threshold of SparseMixer (Liu et al. 2023,
    arXiv:2310.00811), which takes experts one by one: each weight is the share of the largest remaining score among
    the remaining scores that are within twice the threshold of it.
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    softmax_after: bool = False
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_sum: bool = False
    shared: bool = False
    shared_gate: bool = False
    weigh_inputs: bool = False
    correct_logits: bool = False
    sparse_mixer: float = 0.0


class Expert(msgspec.Struct, frozen=True):
    """`up` is a gated matrix [2 I, D], `down` is [D, I]; `limit` as in gated_linear."""

    up: Matrix
    up_bias: FloatArray | None
    down: Matrix
    down_bias: FloatArray | None
    limit: float = 0.0


def experts_width(width: int, experts: Sequence[Expert | None]) -> int:
    """The width of what experts return for inputs of a width."""
    return next((expert.down.shape[0] for expert in experts if expert is not None), width)


class KVCache(Protocol):
    """Paged storage. A block holds `block_size` tokens of every layer."""

    @property
    def spec(self) -> KVSpec: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) of every layer, in order."""


class ModelInput(msgspec.Struct, frozen=True):
    """One ragged step; all arrays are C-contiguous int32.

    Sequence b owns tokens cu_q[b]..cu_q[b+1]-1 at consecutive positions ending at kv_len[b]-1; its block table
    is row slots[b] of `block_table`. Token at position p lives in block table[p // block_size], offset
    p % block_size. `logit_rows` are indices into the T tokens.

    `greedy`: only the largest of each row's logits is needed; a backend that finds it may leave the others undefined.

    `hidden_TD` is float32 and C-contiguous: the output of the previous stage. None if the graph has the first layer.
    `echoes_E2` (or None) are pairs (token t, sequence b): the keys and values of t are also stored at t's position in
    the blocks of b. So branches of a tree of drafts, sequences with blocks of their own, see their common ancestors.

    `adapters_B` is the slot of each sequence's adapter (Executable.adapt), -1 for none. None: no sequence has one.
    """

    tokens_T: IntArray
    positions_T: IntArray
    cu_q_B1: IntArray
    kv_len_B: IntArray
    slots_B: IntArray
    block_table_SM: IntArray
    logit_rows_L: IntArray
    greedy: bool = False
    hidden_TD: FloatArray | None = None
    echoes_E2: IntArray | None = None
    adapters_B: IntArray | None = None


class Limits(msgspec.Struct, frozen=True):
    """The largest step that an executable must support: tokens, sequences, rows of logits at a time, adapter slots."""

    max_tokens: int
    max_seqs: int
    max_logit_rows: int
    max_adapters: int = 0


T = TypeVar("T")


class Ops(Protocol[T]):
    """The operations of a forward pass. T is the backend's tensor; rows are tokens unless said otherwise.

    Exactness (docs/architecture.md): each output row depends only on its own row (and, in attention, its own
    sequence), with an order of reduction that does not depend on how many rows or sequences are in the step.
    """

    def embed(self, table: Matrix, scale: float = 1.0) -> T:
        """Rows of `table` [V, D] for the step's tokens, times scale: [T, D]."""

    def embed_positions(self, table: Matrix, offset: int) -> T:
        """Rows of `table` at each token's position + offset: [T, D]."""

    def add(self, x: T, other: T, scale: float = 1.0) -> T:
        """x + scale * other; both have the same shape."""

    def scale(self, x: T, scale: float, cap: float | None = None) -> T:
        """scale * x, then cap * tanh(x / cap)."""

    def multiply(self, x: T, factors: T) -> T:
        """x [rows, D] times factors [rows, F]: each factor multiplies D / F neighbouring elements."""

    def elementwise(self, x: T, op: Elementwise) -> T:
        """The same function of each element, of its token's position too for Temperature: one row per token."""

    def combine(self, x: T, factors: FloatArray, residual: T | None = None) -> T:
        """Linear combinations of the equal parts of each row: [rows, A D] -> [rows, B D] + residual.

        `factors` is [B, A]. Part b of the result is the sum over a, in ascending order, of factors[b, a] times part a;
        parts whose factor is 0 are left out.
        """

    def mix(self, x: T, factors: T, vectors: int, residual: T | None = None) -> T:
        """`combine` with factors of its own for each row, [rows, B A]; A = `vectors`."""

    def match_rms(self, x: T, like: T, floor: float) -> T:
        """Each part of a row, as wide as `like`, scaled to its root mean square: [rows, A D], [rows, D] -> [rows, A D].

        A mean square of a part below `floor` counts as `floor`.
        """

    def norm(self, x: T, norm: Norm) -> T:
        """[rows, D] -> [rows, D]."""

    def linear(
        self,
        x: T,
        weight: Matrix,
        bias: FloatArray | None = None,
        activation: Activation | None = None,
        residual: T | None = None,
    ) -> T:
        """activation(x @ weight.T + bias) + residual: [rows, K] -> [rows, O]."""

    def gated_linear(
        self,
        x: T,
        weight: Matrix,
        activation: Activation,
        bias: FloatArray | None = None,
        limit: float = 0.0,
    ) -> T:
        """activation(gate) * up of a weight made by `Backend.gated_matrix`: [rows, K] -> [rows, O / 2].

        `bias` is [O]: the gate's, then the up projection's. With a `limit` above 0 the activated gate is at most that,
        and up is bounded by it both ways.
        """

    def rope_angles(self, rope: Rope) -> T:
        """cos and sin of the step's positions, computed once and shared by layers: [T, rotary_dim]."""

    def store_kv(
        self,
        qkv: T,
        layer: int,
        num_heads: int,
        angles: T | None,
        q_norm: Norm | None,
        k_norm: Norm | None,
        v_norm: Norm | None = None,
    ) -> T:
        """Apply norm and rope (if `angles`) to q and k, in the norm's order; store k and v in the cache of `layer`.

        qkv is [T, (N + 2 G) H]: q heads, then k heads, then v heads. Returns q, normed and rotated: [T, N H].
        """

    def queries(self, q: T, num_heads: int, angles: T | None, norm: Norm | None) -> T:
        """The queries [T, N H] of a layer that stores no keys, normed and rotated as by store_kv."""

    def store_latent(self, kv: T, q_latent: T, q_rope: T, layer: int, angles: T, norm: Norm) -> T:
        """The store_kv of latent attention (DeepSeek-V2, arXiv:2405.04434): one key of C + R elements per token.

        kv is [T, C + R]: the latent, which is normed here, and the rotated part. Returns q [T, N (C + R)], made of
        q_latent [T, N C] and the rotated q_rope [T, N R].
        """

    def head_linear(self, x: T, weights: Sequence[Matrix]) -> T:
        """Head n of x times weights[n].T: [T, N K] -> [T, N O]."""

    def route(
        self,
        scores: T,
        routing: Routing,
        correction: FloatArray | None = None,
        weight_scales: FloatArray | None = None,
    ) -> T:
        """Scores [T, E] (and the shared expert's) -> ids of the chosen experts, then their weights: [T, 2 chosen].

        `weight_scales` [E]: the weight of each chosen expert is multiplied by its own.
        """

    def experts(
        self,
        x: T,
        routes: T,
        experts: Sequence[Expert | None],
        activation: Activation,
        weigh_inputs: bool = False,
    ) -> T:
        """Sum over a token's experts, in ascending order, of weight * down(gated(up(x))): [T, D] -> [T, D].

        An expert that is None returns x. `weigh_inputs`: as in Routing. If all `down` have fewer rows, because other
        ranks have the others, the result is [T, rows].
        """

    def relative_scores(
        self, by_query: T | None, by_key: T | None, num_heads: int, places: IntArray, scale: float
    ) -> T:
        """What distances add to the scores of whole sequences (DeBERTa, arXiv:2006.03654): [T, N S], for `attention`.

        by_query and by_key are [T, N B], or None for zeros. The score of the query at i with the key at j gets scale *
        (by_query[i, n, place] + by_key[j, n, place]) with place = places[j - i + P - 1], one of B. `places` is
        [2 P - 1]: sequences have at most P tokens, all in the step. S is P rounded up to a multiple of 64.
        """

    def attention(self, q: T, layer: int, num_heads: int, attention: Attention, scores: T | None = None) -> T:
        """Paged attention over `layer`'s cache: [T, N H] -> [T, N H]; for latent attention [T, N value_dim].

        `scores` [T, N S] are added to those of each query, by position.
        Query head i reads key/value head i // (N / G).
        Softmax is online over tiles of positions aligned to absolute position 0 (Milakov and Gimelshein 2018).
        """

    def all_reduce(self, x: T, peers: Peers | None) -> T:
        """The sum of all ranks' x, added in the order of ranks. `peers` may be None in a graph to measure."""

    def all_gather(self, x: T, widths: Sequence[int], peers: Peers | None) -> T:
        """The columns of all ranks side by side: [rows, widths[rank]] -> [rows, sum of widths]."""

    def select_rows(self, x: T) -> T:
        """The rows in ModelInput.logit_rows: [T, D] -> [L, D]."""

    def receive(self, width: int) -> T:
        """ModelInput.hidden_TD with D = `width`; at most once in a graph."""

    def tap(self, x: T) -> None:
        """Keep x [T, D] of all tokens for `Executable.taps`."""


class Executable(Protocol):
    """A forward pass ready to run, bound to one KV cache."""

    def run(self, inputs: ModelInput) -> Logits:
        """Compute the step and write its KV. Returns the first min(L, max_logit_rows) rows; L may be 0."""

    def logits(self, start: int, stop: int) -> Logits:
        """Logits of logit rows start..stop-1 of the last run, for L above max_logit_rows."""

    def hidden(self) -> FloatArray:
        """A host array [L, D]: final hidden states of the last run (after the last norm, before the head).

        For a graph without a head, [T, D]: the next stage's input. It may be a view, valid until the next `run`.
        """

    def adapt(self, slot: int, adapter: Adapter | None) -> int:
        """Put an adapter into a slot, or empty it, from the next run on; returns the bytes that it takes.

        May be called from any thread. EngineError if the adapter changes what the graph does not compute.
        """

    def taps(self) -> tuple[FloatArray, ...]:
        """Host arrays [T, D]: hidden states after the layers Graph.taps, in order, perhaps views as in `hidden`."""


class Graph(msgspec.Struct, frozen=True):
    """A model, or a stage of one, as two functions over any Ops: `hidden()` gives [L, D], `head(hidden)` gives [L, V].

    A stage is a range of layers for one pipeline rank. All but the last have no head, and their `hidden()` gives
    [T, D] for the next one to receive. `layers` are the model's layers in this graph; layer i uses layer
    i - layers.start of the KV cache. `taps` are the layers whose output `hidden()` taps, in order: the input of
    drafters. `num_token_ids` is the input vocabulary, if it is not the output's (0: it is).
    """

    hidden: Callable[[Ops[Any]], Any]
    head: Callable[[Ops[Any], Any], Any] | None
    vocab_size: int
    hidden_size: int
    layers: range = range(0)
    taps: tuple[int, ...] = ()
    num_token_ids: int = 0

    @property
    def token_limit(self) -> int:
        """All token ids of a step are lower."""
        return self.num_token_ids or self.vocab_size


class ForeignModel(Protocol):
    """A model of a family that Quire lacks, run by another library's code as a graph of one backend."""

    @property
    def dtype(self) -> FloatDtype: ...
    @property
    def architecture(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position(self) -> int: ...
    @property
    def num_parameters(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def generation(self) -> dict[str, Any]:
        """generation_config.json, or empty."""

    @property
    def bidirectional(self) -> bool: ...
    @property
    def segments(self) -> int: ...
    @property
    def has_head(self) -> bool: ...
    def kv_spec(self, dtype: KVDtype) -> KVSpec:
        """ConfigError if its cache cannot have that type."""

    def outline(self) -> Graph:
        """A graph to plan with. It cannot run."""

    def load(self) -> Graph:
        """Read the weights. ModelError if the model cannot run over a paged cache."""


class MachineLimits(msgspec.Struct, frozen=True):
    """Measured limits of a device: reading memory in GB/s, and products of one arithmetic in GFLOP/s."""

    read_gbs: float
    peak_gflops: float
    arithmetic: Arithmetic
    threads: int


class Backend(Protocol):
    """One kind of hardware: makes weights, caches, executables and samplers, and describes its abilities."""

    @property
    def name(self) -> str:
        """For logs and reports, for example 'native avx512, 2 threads'."""

    @property
    def caveat(self) -> str:
        """A warning about models on this backend, completing "MODEL ..."; empty if there is none."""

    @property
    def threads(self) -> int:
        """The number of host threads that compute."""

    @property
    def fingerprint(self) -> str:
        """Identifies all that exported weights depend on. Weights of another fingerprint must not be restored."""

    def outline(self) -> Backend:
        """The same backend for planning: its weights have shapes but no values, and its executables cannot run."""

    def matrix(self, parts: Sequence[Array | QuantTensor], dtype: WeightType) -> Matrix:
        """Pack weights [O_i, K], stacked on O.

        Floats (float32, float16 or bfloat16; may be memory-mapped) are rounded to `dtype`. Quantized tensors must have
        its layout and are kept bit for bit.
        """

    def head(self, parts: Sequence[Array | QuantTensor], dtype: WeightType) -> Matrix:
        """Like `matrix`, for the weight of the logits: may add data that speeds up finding the largest output."""

    def gated_matrix(self, gate: Array | QuantTensor, up: Array | QuantTensor, dtype: WeightType) -> Matrix:
        """Pack a gate and an up projection [I, K] for `gated_linear`: shape [2 I, K]."""

    def takes(self, layout: AnyLayout) -> bool:
        """Whether `matrix` packs quantized tensors of this layout. Others must be passed as floats."""

    def export(self, matrix: Matrix) -> tuple[dict[str, Any], Array]:
        """A description (plain values) and the packed bytes [nbytes] uint8 as they lie in memory."""

    def restore(self, about: dict[str, Any], data: Array) -> Matrix:
        """The matrix that `export` described, in place in `data`, 64-byte aligned. ModelError if they disagree."""

    def kv_cache(self, spec: KVSpec, num_blocks: int, block_size: int) -> KVCache: ...

    def compile(self, graph: Graph, kv: KVCache, limits: Limits) -> Executable: ...

    def sampler(self, vocab_size: int) -> Sampler:
        """A sampler of the logits that this backend's executables return."""

    def workspace_bytes(self, graph: Graph, kv_spec: KVSpec, limits: Limits) -> int:
        """Memory that `compile` will take, logits included, computed before anything is allocated."""

    def free_memory(self) -> int:
        """Bytes that weights, KV cache and workspace can still take."""

    def arithmetic(self, weight: WeightType) -> Arithmetic:
        """The arithmetic of products with such a weight."""

    def measure_limits(self, arithmetic: Arithmetic) -> MachineLimits:
        """Measure the device now, in well under a second.

        `arithmetic` of the result is the one measured: fp32 where the device lacks the one asked for.
        """
