"""The machine's resources for this process, and its measured speed."""

from __future__ import annotations

import math
import os
from pathlib import Path

from quire import _native
from quire.cgroups import MOST_BYTES, memory_groups, tightest
from quire.devices.protocol import Arithmetic, MachineLimits

READ_BYTES = 512 << 20  # more than any cache holds


def usable_threads() -> int:
    """Cores that this process may use: its CPU set, or its cgroup's quota if that is less."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min(cores, cgroup_cores(Path("/sys/fs/cgroup"))))


def cgroup_cores(root: Path) -> int:
    """Return the CPU quota under `root` (cgroup v2, then v1) in whole cores, rounded up; huge if there is none."""
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
    """Count the bytes that this process can still allocate: what is free here, or less if a cgroup limits it."""
    group = tightest(memory_groups())
    return min(_meminfo_available(), MOST_BYTES if group is None else group.left)


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass  # not Linux: no way to ask without a dependency
    return 8 << 30


def measure_limits(threads: int, arithmetic: Arithmetic, isa: str) -> MachineLimits:
    """Measure how fast `threads` threads read memory and multiply, in well under a second.

    If the instruction set `isa` lacks the arithmetic, measure fp32, in which it computes such products.
    """
    read = _native.measure_read_bandwidth(READ_BYTES, threads) / 1e9
    peak = _native.measure_peak(arithmetic, threads, isa) / 1e9
    if peak == 0:
        return MachineLimits(read, _native.measure_peak("fp32", threads, isa) / 1e9, "fp32", threads)
    return MachineLimits(read, peak, arithmetic, threads)
