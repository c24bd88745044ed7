"""The machine's resources for this process, and its measured speed."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from quire import _native
from quire.devices.protocol import Arithmetic, MachineLimits

READ_BYTES = 512 << 20  # more than any cache holds


def usable_threads() -> int:
    """Cores that this process may use: its CPU set, or its cgroup's quota if that is less."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min(cores, cgroup_cores(Path("/sys/fs/cgroup"))))


def cgroup_cores(root: Path) -> int:
    """The CPU quota under `root` (cgroup v2, then v1) in whole cores, rounded up; huge if there is none."""
    unlimited = 1 << 20
    try:
        if (root / "cpu.max").exists():
            quota, period = (root / "cpu.max").read_text().split()
        else:
            quota = (root / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu" / "cpu.cfs_period_us").read_text().strip()
        if quota == "max" or int(quota) <= 0 or int(period) <= 0:
            return unlimited
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # no cgroup, or a format we do not know: no limit
        return unlimited


def free_memory() -> int:
    """Bytes that this process can still allocate: the machine's free memory, or less if a cgroup limits it."""
    free = _meminfo_available()
    for limit, used in _cgroup_memory():
        free = min(free, max(0, limit - used))
    return free


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass  # not Linux: no way to ask without a dependency
    return 8 << 30


def _cgroup_memory() -> Iterator[tuple[int, int]]:
    """(limit, usage) of the memory cgroups, v2 and v1, that bound this process. Reclaimable cache is not usage."""
    for limit_file, used_file, stat_key in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "inactive_file"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        try:
            limit = Path(limit_file).read_text().strip()
            used = int(Path(used_file).read_text())
            stat = dict(
                line.split() for line in (Path(used_file).parent / "memory.stat").read_text().splitlines()
            )
        except (FileNotFoundError, PermissionError, NotADirectoryError):
            continue
        if limit != "max" and int(limit) < 1 << 60:
            yield int(limit), used - int(stat.get(stat_key, 0))


def measure_limits(threads: int, arithmetic: Arithmetic, isa: str) -> MachineLimits:
    """Measure how fast `threads` threads read memory and multiply, in well under a second.

    If the instruction set `isa` lacks the arithmetic, measure fp32, in which it computes such products.
    """
    read = _native.measure_read_bandwidth(READ_BYTES, threads) / 1e9
    peak = _native.measure_peak(arithmetic, threads, isa) / 1e9
    if peak == 0:
        return MachineLimits(read, _native.measure_peak("fp32", threads, isa) / 1e9, "fp32", threads)
    return MachineLimits(read, peak, arithmetic, threads)
