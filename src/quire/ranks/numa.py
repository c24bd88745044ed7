"""Binds this process to the cores of NUMA nodes, so that weights and threads share one memory controller."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from quire.config import DeviceConfig
from quire.errors import ConfigError

NODES = Path("/sys/devices/system/node")


def bind(config: DeviceConfig, nodes: Path = NODES) -> None:
    """Restrict the process to the configured cores, or nodes; with --numa-bind alone, to the node it runs on.

    Memory follows: Linux allocates a page on the node whose core touches it first. ConfigError: there is no such node.
    """
    if not config.binds_cores:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("--numa-bind needs Linux: leave it out")
    allowed = os.sched_getaffinity(0)
    cores: set[int] = set()
    for text in config.numa_bind_cpus:
        cores |= parse_cores(text, "--numa-bind-cpus")
    if not cores:
        named = config.numa_bind_nodes or (_current(nodes, min(allowed)),)
        for node in named:
            cores |= _cores_of(nodes, node)
    usable = cores & allowed
    if not usable:
        raise ConfigError(f"--numa-bind: none of the cores {sorted(cores)} may be used by this process")
    os.sched_setaffinity(0, usable)


def bind_rank(config: DeviceConfig, rank: int, ranks: int, nodes: Path = NODES) -> None:
    """Bind one of several ranks on this machine; they are spread over its nodes unless options say otherwise."""
    chosen = config.numa_bind_nodes or config.numa_bind_cpus
    if ranks > 1 and not chosen and hasattr(os, "sched_setaffinity"):
        allowed = os.sched_getaffinity(0)
        numbers = sorted(int(path.name[4:]) for path in nodes.glob("node[0-9]*"))
        usable = [str(node) for node in numbers if _cores_of(nodes, str(node)) & allowed]
        if len(usable) > 1:
            count = max(1, len(usable) // ranks)
            first = rank * len(usable) // ranks
            config = replace(config, numa_bind_nodes=tuple(usable[first : first + count]))
    bind(config, nodes)


def parse_cores(text: str, where: str) -> set[int]:
    """Parse a list such as 0-3,8. Raises ConfigError."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) >= 1 << 16:
            raise ConfigError(f"{where}: {text!r} is no list of cores such as 0-3,8")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _cores_of(nodes: Path, node: str) -> set[int]:
    path = nodes / f"node{node}" / "cpulist"
    if not node.isdecimal() or not path.is_file():
        known = sorted(one.name[4:] for one in nodes.glob("node[0-9]*"))
        raise ConfigError(
            f"--numa-bind-nodes: there is no node {node!r}; there are {', '.join(known) or 'none'}"
        )
    return parse_cores(path.read_text(), str(path))


def _current(nodes: Path, core: int) -> str:
    """Find the node of a core."""
    for path in sorted(nodes.glob("node[0-9]*")):
        if core in _cores_of(nodes, path.name[4:]):
            return path.name[4:]
    raise ConfigError("--numa-bind: this system shows no NUMA nodes: leave it out")
