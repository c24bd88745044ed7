"""A rank other than the engine's own: `python -m quire.ranks.worker`, started by the engine, a node or a Ray actor.

It reads a RankJoin from standard input, which then stays open: when it closes, the parent has gone and it exits too,
even in the middle of a step. It finds the engine by the RankJoin, and ends when that connection does.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from quire.devices.adapters import Adapter
from quire.devices.exchanges import StageLink
from quire.devices.protocol import Backend, Executable, KVCache, ModelInput
from quire.engine.identity import agreement
from quire.engine.memory_release import MemoryRelease
from quire.engine.plan import device_of, kv_dtype, make_backend, tapped
from quire.engine.source import find_files
from quire.engine.stages import share_of
from quire.engine.wire import leave_with_parent, read_frame, write_frame
from quire.errors import EngineError, ModelError, QuireError, message_of
from quire.lora.arena import files_changed
from quire.lora.reader import Reader, adapter_reader
from quire.model.load import ModelFiles
from quire.model.loaded import ServedModel
from quire.ranks import commands
from quire.ranks.connections import Hello, Links, NoEngineError, connect, own_host
from quire.ranks.numa import bind_rank
from quire.ranks.peers import PeerGroup, Reach, stage_link
from quire.ranks.processes import BEAT, NO_ENGINE, RankJoin, decode_join

log = logging.getLogger("quire.engine")


class Control:
    """The connection to the engine."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def read(self) -> bytes | None:
        """Read the next frame; None if the engine has gone."""
        try:
            return read_frame(self._connection.fileno(), commands.MOST_COMMAND)
        except OSError:
            return None

    def report(self, report: commands.Report) -> None:
        with self._lock:
            write_frame(self._connection.fileno(), commands.encode(report))

    def beat(self) -> None:
        """Tell the engine that this process lives, until the engine has gone: then exit. Runs on its own thread."""
        poller = select.poll()
        poller.register(self._connection, select.POLLHUP | getattr(select, "POLLRDHUP", 0))
        try:
            while not poller.poll(BEAT * 1000):
                self.report(commands.Beat())
        except OSError:
            pass
        os._exit(0)


class Worker:
    """Computes steps of one stage. `Holder` of its share's memory."""

    def __init__(self, source: StageLink | None, sink: StageLink | None, table: tuple[int, int]) -> None:
        self._source, self._sink, self._table_SM = source, sink, np.zeros(table, np.int32)
        self._held: tuple[Executable, KVCache] | None = None

    @property
    def loaded(self) -> bool:
        return self._held is not None

    def unload(self) -> None:
        self._held = None

    def load(self, executable: Executable, cache: KVCache) -> None:
        self._held = executable, cache

    def adapt(self, slot: int, adapter: Adapter | None) -> None:
        """Put an adapter into a slot, from any thread. EngineError: the rank sleeps."""
        if self._held is None:
            raise EngineError("the rank sleeps")
        self._held[0].adapt(slot, adapter)

    def obey(self, command: commands.InOrder) -> None:
        """Obey a command. RuntimeError, OSError: another rank has gone. EngineError: the step breaks a promise."""
        if self._held is None:
            raise EngineError("the rank sleeps")
        executable, cache = self._held
        if isinstance(command, commands.CopyBlocks):
            cache.copy_blocks(command.copies)
        elif isinstance(command, commands.CopyStates):
            cache.copy_states(command.copies)
        elif isinstance(command, commands.DropAdapter):
            executable.adapt(command.slot, None)
        elif isinstance(command, commands.RunHead):
            executable.logits(command.start, command.stop)
        else:
            self._run(executable, command)

    def _run(self, executable: Executable, command: commands.RunStep) -> None:
        inputs: ModelInput = commands.unpacked_step(command, self._table_SM)
        if self._source is not None:
            hidden_TD = self._source.receive(len(inputs.tokens_T))
            inputs = msgspec.structs.replace(inputs, hidden_TD=hidden_TD)
        executable.run(inputs)
        if self._sink is not None:
            self._sink.send(executable.hidden())


def serve(join: RankJoin) -> int:
    """Find the engine, load the rank's share, and obey commands until the engine ends; returns the exit status."""
    config, parallel = join.config, join.config.parallel
    device = device_of(config, join.rank)
    bind_rank(device, join.rank - parallel.own_ranks.start, parallel.ranks_per_node)
    files = find_files(config.model, config.lora.spare_tokens)
    info = files.info
    backend = make_backend(device, info)
    links = Links(own_host(join.address[0]), 0, join.secret)
    hello = Hello("control", join.rank, links.address, agreement(config, info, backend.fingerprint))
    control = Control(connect(join.address, join.secret, hello, parallel.distributed_timeout_seconds))
    frame = control.read()
    if frame is None:
        raise EngineError("the engine ended before it said what to compute")
    launch = commands.decode_launch(frame)
    threading.Thread(target=control.beat, daemon=True).start()
    try:
        worker, memory = _load(join, launch, links, backend, files)
        control.report(commands.RankReady())
        adapters = ThreadPoolExecutor(1, "quire-adapters")  # steps go on while one is loaded
        read = adapter_reader(lambda: memory.model, backend, config.lora)
        while (frame := control.read()) is not None:
            command = commands.decode_command(frame)
            try:
                if isinstance(command, commands.Release | commands.Restore):
                    control.report(_changed(memory, command))
                elif isinstance(command, commands.PlaceAdapter):
                    adapters.submit(_place, control, read, worker, command)
                else:
                    worker.obey(command)
            except EngineError as error:
                if parallel.stage_of(join.rank) < parallel.pipeline_parallel_size - 1:
                    raise
                log.warning("rank %d: %s", join.rank, error)  # the engine's own rank refuses the same step
    except (QuireError, RuntimeError, OSError, MemoryError, msgspec.MsgspecError) as error:
        with suppress(OSError):
            control.report(commands.RankFailed(message_of(error)))
            if parallel.nnodes == 1:  # the engine says it here
                return 1
        raise
    return 0


def _place(control: Control, read: Reader, worker: Worker, command: commands.PlaceAdapter) -> None:
    """Read the rank's share of an adapter, put it into its slot, and answer."""
    answer = commands.RankAnswer()
    try:
        digest, build = read(Path(command.path))
        if digest != command.digest:
            raise ModelError(files_changed(command.path))
        worker.adapt(command.slot, build())
    except Exception as error:  # whatever it is, the engine waits for an answer
        answer = commands.RankAnswer(str(error) or type(error).__name__, isinstance(error, ModelError))
    with suppress(OSError):  # the engine has gone
        control.report(answer)


def _changed(
    memory: MemoryRelease[ServedModel], command: commands.Release | commands.Restore
) -> commands.RankAnswer:
    """Give memory back, or take it again."""
    try:
        if isinstance(command, commands.Release):
            memory.release(command.parts)
        else:
            memory.restore(command.parts)
    except (QuireError, RuntimeError, MemoryError) as error:
        return commands.RankAnswer(str(error) or type(error).__name__)
    return commands.RankAnswer()


def _load(
    join: RankJoin, launch: commands.RankLaunch, links: Links, backend: Backend, files: ModelFiles
) -> tuple[Worker, MemoryRelease[ServedModel]]:
    """Load the rank's share, and get in touch with the ranks that it exchanges activations with."""
    info = files.info
    parallel, rank, size = join.config.parallel, join.rank, join.config.parallel.tensor_parallel_size
    group = PeerGroup(join.config, rank, join.memory)
    shard = msgspec.structs.replace(share_of(parallel, rank, info), peers=group.peers)
    kv_spec = info.kv_spec(kv_dtype(join.config, info.dtype), shard)

    def load_share() -> ServedModel:
        model = files.load(backend, shard)
        model.wait()
        return model

    def make_cache() -> KVCache:
        return backend.kv_cache(kv_spec, *launch.cache)

    def compile(model: ServedModel, cache: KVCache) -> Executable:
        return backend.compile(tapped(model, launch.taps), cache, launch.limits)

    model, cache = load_share(), make_cache()
    executable = compile(model, cache)
    seconds = parallel.distributed_timeout_seconds
    reach = Reach(rank, links, [join.address, *launch.addresses[1:]], join.secret, seconds)
    group.connect(reach, seconds)
    stage = partial(
        stage_link, join.config, rank, width=info.spec.stream_width, max_tokens=launch.limits.max_tokens
    )
    sink = source = None
    if not shard.ends:
        sink = stage(receives=False)
        sink.connect({1: reach("stage", rank - size)}, seconds)
    if shard.stage:
        source = stage(receives=True)
        source.connect({0: reach("stage", rank + size)}, seconds)
    worker = Worker(source, sink, launch.table)
    worker.load(executable, cache)
    parts = model, load_share, make_cache, compile, backend.free_memory
    return worker, MemoryRelease(worker, *parts)


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent decides when this process ends
    stdin = sys.stdin.fileno()
    frame = read_frame(stdin)
    if frame is None:
        sys.stderr.write("standard input ended before the frame: the engine must start this process\n")
        return 1
    threading.Thread(target=leave_with_parent, args=(stdin,), daemon=True).start()
    try:
        return serve(decode_join(frame))
    except (QuireError, RuntimeError, OSError, MemoryError, msgspec.MsgspecError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return NO_ENGINE if isinstance(error, NoEngineError) else 1


if __name__ == "__main__":
    sys.exit(main())
