"""Tensor parallelism on one machine: starts the other ranks, passes them each step, and watches them.

The engine process is rank 0 and does everything but forward passes alone. Each call of its executable goes to the other
ranks too: processes that hold their share of the weights and of the KV cache, and add their parts of each sum through
shared memory (csrc/plan/peers.h).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, TypeVar

import msgspec
import numpy as np

from quire.config import EngineConfig
from quire.devices import registry
from quire.devices.adapters import Adapter
from quire.devices.protocol import Executable, FloatArray, KVCache, KVSpec, Limits, ModelInput
from quire.devices.sampling import Logits
from quire.engine.pipes import write_frame
from quire.errors import EngineError, QuireError
from quire.model.shard import Shard

T = TypeVar("T")

PATIENCE = 10.0
"""Seconds after which a rank that does not answer counts as hung."""
LAST_LINES = 12
"""Lines of a rank's log that the error about its end shows."""
RANK_MODULE = "quire.engine.rank"


class RankLaunch(msgspec.Struct, frozen=True, array_like=True):
    """What a rank computes: read from its standard input. `memory` and `commands` are file descriptors."""

    config: EngineConfig
    rank: int
    size: int
    memory: int
    commands: int
    limits: Limits
    num_blocks: int
    block_size: int


class RunStep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`Executable.run`: the arrays of a ModelInput, with the block tables of the step's sequences alone."""

    arrays: tuple[
        bytes, bytes, bytes, bytes, bytes, bytes
    ]  # tokens, positions, cu_q, kv_len, block table, logit rows


class RunHead(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`Executable.logits`."""

    start: int
    stop: int


class CopyBlocks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`KVCache.copy_blocks`."""

    copies: list[tuple[int, int]]


Command = RunStep | RunHead | CopyBlocks

_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_launch = msgspec.msgpack.Decoder(RankLaunch)


def decode_command(frame: bytes) -> Command:
    return _commands.decode(frame)


def decode_launch(frame: bytes) -> RankLaunch:
    return _launch.decode(frame)


def packed_step(inputs: ModelInput, block_size: int) -> RunStep:
    used = -(-int(inputs.kv_len_B.max()) // block_size) if len(inputs.kv_len_B) else 0
    table = inputs.block_table_SM[inputs.slots_B, :used]
    arrays = inputs.tokens_T, inputs.positions_T, inputs.cu_q_B1, inputs.kv_len_B, table, inputs.logit_rows_L
    tokens, positions, cu_q, kv_len, blocks, rows = (array.tobytes() for array in arrays)
    return RunStep((tokens, positions, cu_q, kv_len, blocks, rows))


def unpacked_step(step: RunStep) -> ModelInput:
    tokens, positions, cu_q, kv_len, table, rows = (np.frombuffer(data, np.int32) for data in step.arrays)
    count = len(kv_len)
    slots = np.arange(count, dtype=np.int32)
    return ModelInput(tokens, positions, cu_q, kv_len, slots, table.reshape(count, -1), rows)


class Ranks:
    """The other ranks of an engine. `peers` is the engine's own connection to them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = _shared_file(registry.peers_bytes(size))
        self.peers = registry.make_peers(self._memory, 0, size, PATIENCE)
        self._processes: list[_RankProcess] = []
        self._close = weakref.finalize(self, _stop, self._processes, self._memory)

    @property
    def shard(self) -> Shard:
        """The engine's own share."""
        return Shard(0, self.size, self.peers)

    def start(self, config: EngineConfig, limits: Limits, num_blocks: int, block_size: int) -> None:
        """Start the processes. They load while the engine does; `wait_ready` waits for them."""
        for rank in range(1, self.size):
            self._processes.append(_RankProcess(rank, self._memory, self.peers.abort))
            self._processes[-1].launch(config, self.size, self._memory, limits, num_blocks, block_size)

    def wait_ready(self) -> None:
        """Wait until all have loaded. EngineError names the rank that could not, with its last log lines."""
        for process in self._processes:
            if not process.wait_ready():
                raise self.failure()

    def send(self, command: Command) -> None:
        """Let the other ranks compute what this one is about to."""
        frame = _encoder.encode(command)
        try:
            for process in self._processes:
                write_frame(process.commands, frame)
        except BrokenPipeError:
            raise self.failure() from None

    def failure(self, error: BaseException | None = None) -> EngineError:
        """The error for a rank that has ended, or `error` if all still run."""
        for process in self._processes:
            if process.ended.wait(0.5):
                return EngineError(process.obituary())
        return EngineError(f"tensor parallelism: {error or 'a rank does not answer'}")

    def close(self) -> None:
        """End the processes and give the shared memory back."""
        self._close()


class _RankProcess:
    """One rank, its pipes, and the threads that watch it."""

    def __init__(self, rank: int, memory: int, abort: Callable[[int], None]) -> None:
        self.rank = rank
        self.ended = threading.Event()
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        theirs, self.commands = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", RANK_MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(memory, theirs),
        )
        self._their_commands = theirs
        for target in (self._read_log, lambda: self._watch(abort)):
            threading.Thread(target=target, name=f"quire-rank-{rank}", daemon=True).start()

    def launch(
        self, config: EngineConfig, size: int, memory: int, limits: Limits, num_blocks: int, block_size: int
    ) -> None:
        assert self._process.stdin is not None
        commands = self._their_commands
        launch = RankLaunch(config, self.rank, size, memory, commands, limits, num_blocks, block_size)
        with suppress(BrokenPipeError):  # `wait_ready` says why
            write_frame(self._process.stdin.fileno(), _encoder.encode(launch))
        os.close(commands)

    def wait_ready(self) -> bool:
        assert self._process.stdout is not None
        return bool(self._process.stdout.read(1))

    def obituary(self) -> str:
        code = self._process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        lines = "".join(f"\n  {line}" for line in self._lines)
        return f"rank {self.rank} {how}{'; its last lines:' if lines else ''}{lines}"

    def stop(self) -> None:
        os.close(self.commands)
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _read_log(self) -> None:
        stderr: IO[bytes] | None = self._process.stderr
        assert stderr is not None
        with stderr:
            for line in stderr:
                self._lines.append(line.decode(errors="replace").rstrip())
                sys.stderr.write(f"rank {self.rank}: {self._lines[-1]}\n")

    def _watch(self, abort: Callable[[int], None]) -> None:
        self._process.wait()
        abort(self.rank)
        self.ended.set()


def _shared_file(size: int) -> int:
    """A file without a name: nothing is left of it when its processes have ended, however they end."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("quire-ranks")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.truncate(fd, size)
    return fd


def _stop(processes: list[_RankProcess], memory: int) -> None:
    for process in processes:
        process.stop()
    os.close(memory)


class RankedExecutable:
    """The engine's executable, which has the other ranks compute the same."""

    def __init__(self, own: Executable, ranks: Ranks, block_size: int) -> None:
        self._own, self._ranks, self._block_size = own, ranks, block_size

    def run(self, inputs: ModelInput) -> Logits:
        return self._together(packed_step(inputs, self._block_size), lambda: self._own.run(inputs))

    def logits(self, start: int, stop: int) -> Logits:
        return self._together(RunHead(start, stop), lambda: self._own.logits(start, stop))

    def hidden(self) -> FloatArray:
        return self._own.hidden()

    def adapt(self, slot: int, adapter: Adapter | None) -> int:
        raise EngineError("adapters are not sharded")

    def taps(self) -> tuple[FloatArray, ...]:
        return self._own.taps()

    def _together(self, command: Command, own: Callable[[], T]) -> T:
        self._ranks.send(command)
        try:
            return own()
        except QuireError:
            raise
        except RuntimeError as error:
            raise self._ranks.failure(error) from error


class RankedKVCache:
    """The engine's KV cache, whose blocks the other ranks copy too."""

    def __init__(self, own: KVCache, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks

    @property
    def spec(self) -> KVSpec:
        return self._own.spec

    @property
    def num_blocks(self) -> int:
        return self._own.num_blocks

    @property
    def block_size(self) -> int:
        return self._own.block_size

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        self._ranks.send(CopyBlocks(list(copies)))
        self._own.copy_blocks(copies)
