"""A rank of tensor parallelism other than the first: `python -m quire.engine.rank`, started by quire.engine.ranks.

It reads a RankLaunch from standard input, which then stays open: when it closes, the engine has gone, and this process
exits too, even in the middle of a step. It writes one byte to standard output when it is ready.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading

from quire.devices import registry
from quire.engine.numa import bind
from quire.engine.pipes import leave_with_parent, read_frame
from quire.engine.ranks import (
    PATIENCE,
    CopyBlocks,
    RankLaunch,
    RunHead,
    decode_command,
    decode_launch,
    unpacked_step,
)
from quire.engine.source import find_source
from quire.engine.start import kv_dtype, make_backend
from quire.errors import EngineError, QuireError
from quire.model.shard import Shard
from quire.model.spec import ArchSpec

log = logging.getLogger("quire.engine")


def serve(launch: RankLaunch) -> None:
    """Load the rank's share and obey commands until their pipe closes."""
    config = launch.config
    device = config.device.of_rank(launch.rank, registry.usable_threads())
    bind(device)
    peers = registry.make_peers(launch.memory, launch.rank, launch.size, PATIENCE)
    shard = Shard(launch.rank, launch.size, peers)
    info, load = find_source(config.model)
    backend = make_backend(device, info)
    model = load(backend, True, shard)
    assert isinstance(info.spec, ArchSpec)
    spec = info.kv_spec(kv_dtype(config, info.dtype), shard)
    cache = backend.kv_cache(spec, launch.num_blocks, launch.block_size)
    executable = backend.compile(model.graph, cache, launch.limits)
    model.wait()
    os.write(sys.stdout.fileno(), b"1")
    while (frame := read_frame(launch.commands)) is not None:
        command = decode_command(frame)
        try:
            if isinstance(command, CopyBlocks):
                cache.copy_blocks(command.copies)
            elif isinstance(command, RunHead):
                executable.logits(command.start, command.stop)
            else:
                executable.run(unpacked_step(command))
        except EngineError as error:  # the engine's own rank refuses the same step
            log.warning("rank %d: %s", launch.rank, error)


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the engine decides when this process ends
    stdin = sys.stdin.fileno()
    frame = read_frame(stdin)
    if frame is None:
        sys.stderr.write("standard input ended before the launch frame: the engine must start this process\n")
        return 1
    threading.Thread(target=leave_with_parent, args=(stdin,), daemon=True).start()
    try:
        serve(decode_launch(frame))
    except (QuireError, RuntimeError, MemoryError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
