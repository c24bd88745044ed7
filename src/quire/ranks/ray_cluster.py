"""Ranks on the machines of a Ray cluster: Ray places and starts them, and passes on nothing else.

One actor per rank runs the rank's process, which finds the engine by itself, as on any machine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from quire.config import EngineConfig
from quire.devices import registry
from quire.errors import ConfigError, EngineError
from quire.lazy import Lazy, need
from quire.ranks.processes import FAREWELL, RankJoin, RankProcess, decode_join

ray: Any = Lazy("ray")
ray_util: Any = Lazy("ray.util")
strategies: Any = Lazy("ray.util.scheduling_strategies")


class RankActor:
    """Runs one rank in a process of its own, which ends with the actor."""

    def run(self, join: bytes) -> str:
        """Run the rank to its end, and report its exit."""
        ended = threading.Event()
        process = RankProcess(decode_join(join), ended.set)
        ended.wait()
        return process.obituary()


class Cluster:
    """The Ray cluster that this process is part of, or a new one on this machine."""

    def __init__(self, config: EngineConfig) -> None:
        """ConfigError: Ray is not installed or cannot be reached."""
        need("--distributed-executor-backend ray", "ray")
        self._config = config
        try:
            ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level="warning")
        except (RuntimeError, ConnectionError, ValueError) as error:
            raise ConfigError(f"--distributed-executor-backend ray: {error}") from error
        self.own_host = str(ray_util.get_node_ip_address())

    def start(self, joins: Sequence[RankJoin], on_end: Sequence[Callable[[], None]]) -> list[ActorHost]:
        """Start an actor for each rank. EngineError: the cluster has no room for them."""
        cores = self._config.device.threads or registry.usable_threads()
        own = {"CPU": cores, f"node:{self.own_host}": 0.001}  # the engine's own cores
        group = ray_util.placement_group([own, *[{"CPU": cores}] * len(joins)], strategy="PACK")
        seconds = self._config.parallel.distributed_timeout_seconds
        if not group.wait(seconds):
            free = ray.available_resources().get("CPU", 0)
            ray_util.remove_placement_group(group)
            raise EngineError(
                f"Ray has no room for {1 + len(joins)} ranks of {cores} CPUs each: {free:g} CPUs are free; lower "
                "--threads or add machines"
            )
        actor = ray.remote(RankActor)
        hosts = []
        for index, (join, end) in enumerate(zip(joins, on_end, strict=True), 1):
            place = strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            handle = actor.options(num_cpus=cores, max_restarts=0, scheduling_strategy=place).remote()
            hosts.append(ActorHost(handle, msgspec.msgpack.encode(join), end, group if index == 1 else None))
        return hosts


class ActorHost:
    """A rank that an actor runs. The first one holds the actors' placement group."""

    def __init__(self, actor: Any, join: bytes, on_end: Callable[[], None], group: Any) -> None:
        self._actor, self._group = actor, group
        self._how = ""
        self._run = actor.run.remote(join)
        self._watcher = threading.Thread(target=self._watch, args=(on_end,), daemon=True)
        self._watcher.start()

    def kill(self) -> None:
        ray.kill(self._actor)

    def obituary(self) -> str:
        self._watcher.join(FAREWELL)
        return self._how or "lost its connection to the engine"

    def stop(self) -> None:
        ray.kill(self._actor)
        if self._group is not None:
            ray_util.remove_placement_group(self._group)
            self._group = None

    def _watch(self, on_end: Callable[[], None]) -> None:
        try:
            self._how = str(ray.get(self._run))
        except ray.exceptions.RayError as error:
            self._how = f"ended with its actor: {error}"
        on_end()
