"""Sums over the ranks of a stage: through memory that GPUs reach of each other, or by NCCL, with equal bits."""

from __future__ import annotations

import logging
import os
import socket
import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric

from quire.devices.cuda.kernels.ranks import (
    PROGRAMS,
    Parts,
    collect_slices,
    publish_part,
    sum_parts,
)
from quire.devices.cuda.launch import Launcher
from quire.devices.peers import Peers
from quire.devices.torch.exchange import TorchPeers, summed
from quire.files import unnamed_file

log = logging.getLogger("quire.devices")

MOST = 16 << 20
"""MOST bytes of a part pass through memory of the GPUs; larger ones are gathered."""
PADS = 1 << 16
"""PADS bytes in front of it are the ranks' signals."""
ROOM = PADS + 3 * MOST
"""ROOM bytes of a GPU: signals, two halves for parts, and sums of slices."""
ONE_SHOT = {2: 1 << 20, 4: 512 << 10}
"""ONE_SHOT bytes of a part are read by every rank; of larger ones a rank adds a slice. Of more ranks: half of 4's."""


class SharedMemory:
    """`own` ROOM bytes of this rank, which all ranks reach at `bases`. A barrier ends when `stop`, an address, holds 1.

    Without `stop` it waits for nobody: ranks run in turn, for tests.
    """

    def __init__(self, own: Any, bases: Sequence[int], rank: int, stop: int | None) -> None:
        self.rank, self.size, self._waits = rank, len(bases), stop is not None
        starts = [base + begin for begin in (0, PADS, PADS + MOST, PADS + 2 * MOST) for base in bases]
        made = torch.tensor([*starts, stop or 0], dtype=torch.int64, device=own.device)
        self._parts, self._sums = made[self.size : 3 * self.size], made[3 * self.size : 4 * self.size]
        self._pads = torch.cat([made[: self.size], made[-1:]])
        self._own_sums = own[PADS + 2 * MOST :]
        self._epochs = torch.zeros(PROGRAMS, dtype=torch.int32, device=own.device)

    def publish(self, run: Launcher, x: Any) -> Parts:
        """Show x to the other ranks, and find theirs."""
        self._wait(run, x)
        return Parts(self._parts, self.size, self._epochs, x)

    def add_slice(self, run: Launcher, parts: Parts, like: Any) -> int:
        """Add this rank's slice of published parts, rounded as `like`; returns the size of a slice."""
        count = int(like.numel())
        size = -(-count // (self.size * 16)) * 16
        begin = min(size * self.rank, count)
        own = self._own_sums[: count * like.itemsize].view(like.dtype)
        if begin < count:
            sum_parts(run, parts, own, begin, min(size, count - begin))
        return size

    def collect(self, run: Launcher, size: int, like: Any, out: Any) -> None:
        """Wait for all slices, and gather them."""
        self._wait(run, None)
        collect_slices(run, self._sums, self.size, size, like, out)

    def _wait(self, run: Launcher, x: Any) -> None:
        publish_part(run, x, self._parts, self._pads, self._epochs, self.rank, self.size, self._waits)


class RankSums:
    """Adds parts of `ranks` ranks. Memory that GPUs reach of each other is made at the first sum."""

    def __init__(self, run: Launcher, peers: Peers | None, ranks: int) -> None:
        self._run, self._peers, self._ranks = run, peers, ranks
        self._memory: SharedMemory | None = None
        self._is_new = True

    def add(self, x: Any, out: Any, like: Any = None) -> None:
        """Add all ranks' x to `out`, of one shape, rounded as `like`, or as `out` is; x may be `out`."""
        like = out if like is None else like
        for parts in self.ways(x):
            if parts is not None:
                sum_parts(self._run, parts, out)
            elif (memory := self._memory) is not None:
                size = memory.add_slice(self._run, memory.publish(self._run, x), like)
                memory.collect(self._run, size, like, out)

    def passes(self, x: Any) -> bool:
        """Tell whether such parts pass through memory that all reach, by kernels alone, which a graph may hold."""
        if self._is_new:
            self._memory, self._is_new = self._made(x), False
        return self._memory is not None and x.nbytes <= MOST

    def ways(self, x: Any) -> Iterator[Parts | None]:
        """Where a kernel finds all parts; None: `add` is faster. Of a tensor without values, all that there are."""
        passes, memory = self.passes(x), self._memory
        if x.is_meta or not passes:
            yield self._gathered(x)
        if memory is not None and (x.is_meta or x.nbytes <= ONE_SHOT.get(self._ranks, 256 << 10)):
            yield memory.publish(self._run, x)
        elif passes:
            yield None
        if x.is_meta:
            yield None

    def _gathered(self, x: Any) -> Parts:
        if x.is_meta:
            return Parts(x.new_empty((self._ranks, *x.shape)), self._ranks)
        if isinstance(self._peers, TorchPeers):
            return Parts(self._peers.parts(x), self._ranks)
        return Parts(summed(x, self._peers)[None], 1)

    def _made(self, x: Any) -> SharedMemory | None:
        if x.is_meta:
            return SharedMemory(torch.empty(ROOM, dtype=torch.uint8, device="meta"), [0] * self._ranks, 0, 0)
        return shared_memory(self._peers, x.device) if isinstance(self._peers, TorchPeers) else None


def shared_memory(peers: TorchPeers, device: Any) -> SharedMemory | None:
    """Make memory that all ranks reach; None, with a line in the log, if their GPUs do not reach each other's.

    The interpreter's ranks map files of each other.
    """
    own = torch.tensor([device.index or 0, zlib.crc32(socket.gethostname().encode())], device=device)
    places = peers.parts(own).tolist()
    near = all(host == places[peers.rank][1] for _, host in places) and all(
        torch.cuda.can_device_access_peer(device.index or 0, index)
        for index, _ in places
        if index != (device.index or 0)
    )
    memory, problem = None, "GPUs do not reach each other's memory"
    if all(peers.parts(torch.tensor([near], device=device)).flatten().tolist()):
        try:
            memory = (_mapped if device.type == "cuda" else _files)(peers, device)
        except (RuntimeError, OSError) as error:
            problem = str(error).partition("\n")[0]
    if all(peers.parts(torch.tensor([memory is not None], device=device)).flatten().tolist()):
        return memory
    log.warning("ranks gather parts of sums by NCCL, and do not read each other's memory: %s", problem)
    return None


def _mapped(peers: TorchPeers, device: Any) -> SharedMemory:
    own = symmetric.empty(ROOM, dtype=torch.uint8, device=device)
    own.zero_()
    torch.cuda.synchronize(device)
    handle = symmetric.rendezvous(own, peers.registered(device))
    bases = [handle.get_buffer(rank, (1,), torch.uint8).data_ptr() for rank in range(peers.size)]
    return SharedMemory(own, bases, peers.rank, peers.stop.data_ptr())


def _files(peers: TorchPeers, device: Any) -> SharedMemory:
    peers.stop = torch.zeros(1, dtype=torch.int32)
    file = unnamed_file(ROOM)
    every = [
        torch.from_file(f"/proc/{process}/fd/{number}", shared=True, size=ROOM, dtype=torch.uint8)
        for process, number in peers.parts(torch.tensor([os.getpid(), file])).tolist()
    ]
    bases = [memory.data_ptr() for memory in every]
    made = SharedMemory(every[peers.rank], bases, peers.rank, peers.stop.data_ptr())
    weakref.finalize(made, lambda *mapped: os.close(file), *every)  # which live as long
    return made
