import array
from collections.abc import Sequence
from typing import Annotated

import numpy
import numpy.typing
from numpy.typing import NDArray


def available_isas() -> list[str]:
    """Instruction sets that this CPU can run, best first."""

def resolve_isa(isa: str) -> str:
    """The set that 'auto' means, or the given one if it can run."""

class ThreadPool:
    """Threads that run kernels; one pool per backend."""

    def __init__(self, threads: int) -> None: ...

    @property
    def threads(self) -> int: ...

def measure_read_bandwidth(bytes: int, threads: int) -> float:
    """
    Bytes per second at which `threads` threads read a buffer of `bytes`; takes less than 0.3 s.
    """

def measure_peak(kind: str, threads: int, isa: str = 'auto') -> float:
    """
    Operations per second (a multiply-add is two) of kind 'fp32', 'bf16' or 'int8' on an instruction set; 0 where it has no instruction for the kind; takes less than 0.3 s.
    """

class AttentionCache:
    """One layer of KV cache, copied from arrays (tests, benchmarks)."""

    def __init__(self, keys: Annotated[NDArray, dict(order='C', device='cpu')], values: Annotated[NDArray, dict(order='C', device='cpu')]) -> None: ...

def attention(isa: str, pool: ThreadPool, cache: AttentionCache, q: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], cu_q: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], kv_len: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], block_table: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], scale: float, window: int, chunk: int = 0, ahead: int = 0, cap: float = 0.0, slopes: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, sinks: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> None:
    """Paged attention of one step, for tests and benchmarks."""

class Peers:
    """
    A rank's connection to the others, with which it adds and gathers activations.
    """

    def __init__(self, fd: int, rank: int, size: int, patience: float) -> None:
        """Through a shared file of `bytes` zero bytes."""

    @staticmethod
    def over(exchange: object, rank: int, size: int) -> Peers:
        """Through an object with `exchange` and `abort`."""

    @staticmethod
    def bytes(size: int) -> int:
        """Bytes of the shared file."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def abort(self, rank: int) -> None:
        """End all waiting, because this rank has gone."""

    def all_reduce(self, x: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')]) -> None:
        """Sum x over all ranks, in place."""

class Format:
    """
    How a weight is held and what it is multiplied with (csrc/linear/format.h).
    """

    def __init__(self, *, layout: str, group: int = 0, offsets: bool = False, narrow: bool = False, int8_rows: bool = False, inputs: bool = False, screened: bool = False, blocks: Sequence[tuple[str, int]] = [], nonzeros: int = 0, rounding: tuple[str, str, int, float, float, int, bool] | None = None) -> None: ...

    @property
    def layout(self) -> str: ...

    @property
    def group(self) -> int: ...

    @property
    def offsets(self) -> bool: ...

    @property
    def narrow(self) -> bool: ...

    @property
    def int8_rows(self) -> bool: ...

    @property
    def inputs(self) -> bool: ...

    @property
    def screened(self) -> bool: ...

    @property
    def nonzeros(self) -> int: ...

    @property
    def blocks(self) -> list[tuple[str, int]]: ...

    @property
    def rounding(self) -> tuple[str, str, int, float, float, int, bool] | None: ...

def layouts() -> list[str]:
    """Names of the layouts that weights can have."""

class PackedMatrix:
    """A weight in panels of 16 rows."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def gated(self) -> bool: ...

    @property
    def format(self) -> Format: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def screen_nbytes(self) -> int: ...

    def bytes(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]: ...

    def dequantize(self, pool: ThreadPool) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None))]: ...

def outline(rows: int, cols: int, format: Format, gated: bool) -> PackedMatrix:
    """The shape of a weight without values, for planning."""

def packed(rows: int, cols: int, format: Format, gated: bool, data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> PackedMatrix:
    """A weight in place in bytes that `PackedMatrix.bytes` returned."""

def pack(parts: Sequence[tuple[Annotated[NDArray, dict(shape=(None, None), device='cpu', writable=False)], str]], format: Format, gated: bool, isa: str, pool: ThreadPool) -> PackedMatrix:
    """
    Packs (array, type) parts stacked on rows; with `gated`, a gate and an up projection.
    """

def pack_codes(parts: Sequence[tuple[Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None]], format: Format, gated: bool, inputs: tuple[Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)]] | None, pool: ThreadPool) -> PackedMatrix:
    """
    The same for (codes, scales, offsets) parts, which are kept bit for bit.
    """

def pack_blocks(parts: Sequence[Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)]], cols: int, format: Format, gated: bool, inputs: tuple[Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)]] | None, sparse: Sequence[tuple[Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)]]], pool: ThreadPool) -> PackedMatrix:
    """The same for rows of blocks, whose kinds are the format's."""

class KVStore:
    """Paged keys and values of all layers."""

    def __init__(self, layers: Sequence[tuple[int, int, int, int, Sequence[tuple[int, int]]]], type: str, num_blocks: int, block_size: int, scales: Sequence[Sequence[float]] = [], columns: Sequence[int] = [], num_slabs: int = 0, num_states: int = 0, num_open: int = 0) -> None: ...

    @property
    def nbytes(self) -> int: ...

    def place_blocks(self, rows: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> None: ...

    def copy_blocks(self, source: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], destination: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def copy_states(self, source: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], destination: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

class Plan:
    """A recorded forward pass."""

    def __init__(self, arg0: str, arg1: ThreadPool, arg2: Sequence[tuple[int, int, int, int, Sequence[tuple[int, int]]]], arg3: int, arg4: int, arg5: int, arg6: int, /) -> None: ...

    @property
    def workspace_bytes(self) -> int: ...

    def bind(self, kv: KVStore) -> None: ...

    def run(self, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], positions: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], cu_q: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], kv_len: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], block_table: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], logit_rows: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], greedy: bool, hidden: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, adapters: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, states: tuple[Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)]] | None = None) -> None: ...

    def set_adapter(self, slot: int, changes: Sequence[tuple[int, int, PackedMatrix | None, Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, Sequence[tuple[PackedMatrix, int, int]], Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, PackedMatrix | None, Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, object]] | None) -> int: ...

    def head(self, start: int, stop: int) -> None: ...

    @property
    def num_logit_rows(self) -> int: ...

    def poison(self) -> None: ...

    def logits_view(self) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None))]: ...

    def tap_view(self, buffer: int) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None))]: ...

    def best_view(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)] | None: ...

    def hidden_view(self) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None))]: ...

    def record(self, op: object) -> int:
        """
        Append an operation whose operands are numbers of buffers; returns its buffer.
        """

    @staticmethod
    def operations() -> list:
        """Names of the operations that a plan can have."""

    def begin_head(self, hidden: int) -> int: ...

    def tap(self, x: int) -> None: ...

    def finish(self, logits: int) -> None: ...

    def width(self, buffer: int) -> int: ...

class Turn:
    @property
    def seconds(self) -> float: ...

    @property
    def limit(self) -> float: ...

def compare_linear(isa: str, pool: ThreadPool, weights: Sequence[PackedMatrix], rows: int, kind: str, rounds: int) -> list[Turn]:
    """
    Turns of products of `rows` rows with `weights`, and of a limit: 'read' (bytes per second) or as measure_peak.
    """

class SlotRules:
    """The lists of a request, which its slots share."""

    def __init__(self, vocab_size: int, stop_ids: Sequence[int], allowed: Sequence[int], bad_words: Sequence[Sequence[int]], bias: Sequence[tuple[int, float]]) -> None: ...

class PromptTokens:
    """The tokens of a prompt, which its slots share."""

    def __init__(self, vocab_size: int, prompt: Sequence[int], penalised: bool) -> None: ...

class SlotParams:
    """How a slot is sampled; see quire.devices.sampling.SlotSampling."""

    def __init__(self) -> None: ...

    @property
    def seed(self) -> int: ...

    @seed.setter
    def seed(self, arg: int, /) -> None: ...

    @property
    def greedy(self) -> bool: ...

    @greedy.setter
    def greedy(self, arg: bool, /) -> None: ...

    @property
    def temperature(self) -> float: ...

    @temperature.setter
    def temperature(self, arg: float, /) -> None: ...

    @property
    def top_k(self) -> int: ...

    @top_k.setter
    def top_k(self, arg: int, /) -> None: ...

    @property
    def top_p(self) -> float: ...

    @top_p.setter
    def top_p(self, arg: float, /) -> None: ...

    @property
    def low_scaled(self) -> float: ...

    @low_scaled.setter
    def low_scaled(self, arg: float, /) -> None: ...

    @property
    def repetition_penalty(self) -> float: ...

    @repetition_penalty.setter
    def repetition_penalty(self, arg: float, /) -> None: ...

    @property
    def frequency_penalty(self) -> float: ...

    @frequency_penalty.setter
    def frequency_penalty(self, arg: float, /) -> None: ...

    @property
    def presence_penalty(self) -> float: ...

    @presence_penalty.setter
    def presence_penalty(self, arg: float, /) -> None: ...

    @property
    def min_tokens(self) -> int: ...

    @min_tokens.setter
    def min_tokens(self, arg: int, /) -> None: ...

    @property
    def wants_logprobs(self) -> bool: ...

    @wants_logprobs.setter
    def wants_logprobs(self, arg: bool, /) -> None: ...

    @property
    def num_top(self) -> int: ...

    @num_top.setter
    def num_top(self, arg: int, /) -> None: ...

    @property
    def output(self) -> list[int]: ...

    @output.setter
    def output(self, arg: Sequence[int], /) -> None: ...

    @property
    def rules(self) -> SlotRules: ...

    @rules.setter
    def rules(self, arg: SlotRules, /) -> None: ...

    @property
    def prompt(self) -> PromptTokens: ...

    @prompt.setter
    def prompt(self, arg: PromptTokens, /) -> None: ...

class Sampler:
    """Draws tokens by slot; see quire.devices.cpu.sampler.NativeSampler."""

    def __init__(self, pool: ThreadPool, isa: str, vocab_size: int) -> None: ...

    def set(self, slot: int, params: SlotParams) -> None: ...

    def clear(self, slot: int) -> None: ...

    def extend(self, slot: int, tokens: Sequence[int]) -> None: ...

    def retract(self, slot: int, count: int) -> None: ...

    def sample(self, logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu', writable=False)], slots: Sequence[int], positions: Sequence[int], drafts: Sequence[int] | None, masks: Annotated[NDArray[numpy.uint32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, best: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None) -> tuple: ...

    def logprobs(self, logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu', writable=False)], targets: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], num_top: int) -> list: ...

def find_last_tokens(text: array.array[int] | numpy.typing.NDArray[numpy.int32], tail: array.array[int] | numpy.typing.NDArray[numpy.int32], low: int, high: int, start: int = 0) -> tuple[int, int]:
    """
    (end, length) of the longest match of the last low..high tokens of `tail` in `text`; of equal lengths the first that ends behind `start`, else the first. Length 0: none.
    """

class SuffixTree:
    """Counts of the token strings of a set of sequences, up to a depth."""

    def __init__(self, max_depth: int) -> None: ...

    def extend(self, sequence: int, tokens: Sequence[int]) -> None: ...

    def close(self, sequence: int) -> None: ...

    def remove(self, sequence: int) -> None: ...

    def draft(self, context: array.array[int] | numpy.typing.NDArray[numpy.int32], max_tokens: int, factor: float, offset: float, min_probability: float) -> tuple[list[int], list[float], float, int]:
        """
        (tokens, probability of each with all before it, their sum, length of the match)
        """

    def sound(self) -> bool: ...

    @property
    def num_sequences(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

def strings_end(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], at: int, count: int) -> int:
    """
    The byte behind `count` strings that begin at byte `at`. IndexError if the data ends before.
    """

def read_strings(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], at: int, count: int) -> list:
    """
    A list of `count` strings. IndexError if the data ends before, UnicodeDecodeError if they are not UTF-8.
    """
