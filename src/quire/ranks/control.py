"""The other ranks of an engine: starts them, waits until they have found it, and passes them each step.

The engine process is rank 0: it computes its share of the last stage, and does everything but forward passes alone. The
others hold their share of the weights and of the KV cache. All connect to the engine, wherever they run.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from quire.config import EngineConfig
from quire.devices.exchanges import StageLink, passes_tensors
from quire.devices.protocol import Limits
from quire.errors import DeviceLostError, EngineError, ModelError
from quire.ranks.commands import Command, RankLaunch, encode
from quire.ranks.connections import Address, Hello, Kind, Links
from quire.ranks.peers import PeerGroup, shared_files, stage_link
from quire.ranks.processes import COMPILING, FAREWELL, SILENCE, Member, RankHost, RankJoin, RankProcess, watch
from quire.ranks.ray_cluster import Cluster

log = logging.getLogger("quire.engine")

LOOPBACK = "127.0.0.1"
LOOK = 0.2
"""Look every LOOK seconds whether a rank that has not joined yet has ended."""


class Ranks:
    """The other ranks of the engine, its `members`: `peers` in its own stage, `earlier` in the stages before."""

    def __init__(self, config: EngineConfig, width: int, limits: Limits, agreement: str) -> None:
        """`width` is the residual stream's, `agreement` what all ranks must be about to compute."""
        self._config, self._parallel = config, config.parallel
        self._agreement = agreement
        self._aborts: list[Callable[[int], None]] = []
        compiles = passes_tensors(config.device.device, config.device.backend)
        silence = COMPILING if compiles else SILENCE
        self.members = [
            Member(rank, partial(_abort, self._aborts), silence) for rank in range(1, self._parallel.world)
        ]
        size = self._parallel.tensor_parallel_size
        self.peers, self.earlier = self.members[: size - 1], self.members[size - 1 :]
        self._cluster = None
        if self._parallel.distributed_executor_backend == "ray":
            self._cluster = Cluster(config)
        self._links, self._secret = self._listen()
        self._files = shared_files(self._parallel)
        self._group = PeerGroup(config, 0, self._files.get(0))
        self.connection = self._group.peers  # to the ranks of the engine's own stage, if there are others
        self._aborts.append(self._group.abort)
        self._asking = threading.Lock()
        self.input: StageLink | None = None
        if self.earlier:
            self.input = stage_link(config, 0, True, width, limits.max_tokens)
            self._aborts.append(self.input.abort)
        connected: list[PeerGroup | StageLink] = [self._group, *([] if self.input is None else [self.input])]
        self._gathered, self._problem = threading.Event(), ""
        stopped = threading.Event()
        self._close = weakref.finalize(
            self, _stop, self.members, self._files, self._links, connected, stopped
        )
        threading.Thread(target=watch, args=(self.members, stopped), daemon=True).start()

    def start(
        self, limits: Limits, cache: tuple[int, ...], taps: tuple[int, ...], table: tuple[int, int]
    ) -> None:
        """Start the ranks of this machine, or of a Ray cluster. All load while the engine does: see `wait_ready`."""
        own = [member for member in self.members if member.rank in self._parallel.own_ranks]
        joins = [
            RankJoin(
                self._config, member.rank, self._links.address, self._secret, self._files.get(member.rank)
            )
            for member in own
        ]
        if self._cluster is not None:
            hosts: Sequence[RankHost] = self._cluster.start(joins, [member.end for member in own])
        else:
            hosts = [RankProcess(join, member.end) for join, member in zip(joins, own, strict=True)]
        for member, host in zip(own, hosts, strict=True):
            member.process = host
        threading.Thread(
            target=self._gather, args=(partial(RankLaunch, limits, cache, taps, table),), daemon=True
        ).start()

    def wait_ready(self) -> None:
        """Wait until all have loaded. EngineError names the rank that could not, with its last log lines."""
        self._gathered.wait()
        if self._problem:
            raise EngineError(self._problem)
        self._group.connect(self._reach, self._parallel.distributed_timeout_seconds)
        if self.input is not None:
            before = self._reach("stage", self._parallel.tensor_parallel_size)
            self.input.connect({0: before}, self._parallel.distributed_timeout_seconds)
        for member in self.members:
            if not member.wait_ready():
                raise EngineError(member.obituary())

    @contextmanager
    def obeying(self, command: Command) -> Iterator[None]:
        """Have every rank obey a command beside the context. EngineError, or a rank's ModelError: one could not."""
        with self._asking:
            frame = encode(command)
            for member in self.members:
                member.ask(frame)
            yield
            for rank, answer in [(member.rank, member.answer()) for member in self.members]:
                if answer.error:
                    kind = ModelError if answer.refused else EngineError
                    raise kind(f"rank {rank}: {answer.error}")

    def failure(self, error: BaseException | None = None) -> EngineError:
        """Make the error for a rank that has ended, or return `error` if all still run."""
        deadline = time.monotonic() + FAREWELL
        while time.monotonic() < deadline:
            for member in self.members:
                if member.ended.is_set():
                    return EngineError(member.obituary())
            time.sleep(LOOK / 10)
        return EngineError(f"parallel ranks: {error or 'one does not answer'}")

    def check(self) -> None:
        """Raise DeviceLostError if a rank has ended, so that what was computed since may be anything."""
        for member in self.members:
            if member.ended.is_set():
                raise DeviceLostError(member.obituary())

    def close(self) -> None:
        """End the ranks and give the shared memory back."""
        self._close()

    def _listen(self) -> tuple[Links, bytes]:
        """Open the port where the ranks find the engine, and the secret that they prove to know."""
        parallel = self._parallel
        if parallel.nnodes == 1:
            secret = secrets.token_bytes(32)
            host = LOOPBACK if self._cluster is None else self._cluster.own_host
            return Links(host, 0, secret), secret
        if not parallel.secret:
            log.warning(
                "without --distributed-secret-file, whoever reaches %s:%d can pose as a rank of this engine",
                parallel.master_addr,
                parallel.master_port,
            )
        return Links(parallel.master_addr, parallel.master_port, parallel.secret), parallel.secret

    def _gather(self, launch: Callable[[list[Address]], RankLaunch]) -> None:
        """Wait until all ranks have found the engine, and tell each what to compute."""
        try:
            for member in self.members:
                connection, hello = self._await("control", member)
                member.join(connection, hello)
                self._check(hello)
            addresses = [self._links.address, *(member.address for member in self.members)]
            frame = encode(launch(addresses))
            for member in self.members:
                member.send(frame)
        except EngineError as error:
            self._problem = str(error)
        finally:
            self._gathered.set()

    def _reach(self, kind: Kind, rank: int) -> socket.socket:
        return self._await(kind, self.members[rank - 1])[0]

    def _await(self, kind: Kind, member: Member) -> tuple[socket.socket, Hello]:
        """Wait for a rank's connection to the engine. EngineError: it makes none in time, or has ended."""
        deadline = time.monotonic() + self._parallel.distributed_timeout_seconds
        while (found := self._links.take(kind, member.rank, LOOK)) is None:
            if member.ended.is_set():
                raise EngineError(member.obituary())
            if self._links.closed or time.monotonic() > deadline:
                host, port = self._links.address
                raise EngineError(f"rank {member.rank} has not found the engine at {host}:{port}")
        return found

    def _check(self, hello: Hello) -> None:
        """Raise EngineError if a rank does not fit the engine."""
        if hello.agreement != self._agreement:
            raise EngineError(
                f"rank {hello.rank} at {hello.address[0]} would compute something else: start all machines with the "
                "same model, options and version of Quire, and with the same --isa if their CPUs differ"
            )


def send(members: Sequence[Member], command: Command) -> None:
    """Send ranks a command, which they obey in the order of steps. EngineError: one has ended."""
    frame = encode(command)
    for member in members:
        member.send(frame)


def _abort(aborts: Sequence[Callable[[int], None]], rank: int) -> None:
    for abort in aborts:
        abort(rank)


def _stop(
    members: Sequence[Member],
    files: dict[int, int],
    links: Links,
    connected: Sequence[PeerGroup | StageLink],
    stopped: threading.Event,
) -> None:
    stopped.set()
    links.close()
    for member in members:
        member.stop()
    for member in members:
        member.close()
    for link in connected:
        link.close()
    for file in set(files.values()):
        os.close(file)
