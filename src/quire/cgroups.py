"""Reads the control groups that bound this process's memory, v2 and v1, up to the root of those that it sees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
V2 = ("memory.max", "memory.current", "inactive_file", "memory.events")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control")
MOST_BYTES = 1 << 60  # v1 writes "no limit" as a number above


class MemoryGroup(msgspec.Struct, frozen=True):
    """A control group: bytes that it may use (None: any) and uses, and how many of its processes memory has killed.

    File pages that can be given back are not used.
    """

    limit: int | None
    used: int
    kills: int

    @property
    def left(self) -> int:
        """Return the bytes that are left of the limit."""
        return MOST_BYTES if self.limit is None else max(0, self.limit - self.used)


def memory_groups(root: Path = ROOT, own: Path = OWN) -> list[MemoryGroup]:
    """Read this process's groups, innermost first. What the system does not tell is left out."""
    found = [_read(place, *names) for place, names in _places(root, own)]
    return [group for group in found if group is not None]


def tightest(groups: list[MemoryGroup]) -> MemoryGroup | None:
    """Find the group with a limit that leaves the fewest bytes."""
    return min((group for group in groups if group.limit is not None), key=lambda g: g.left, default=None)


def _places(root: Path, own: Path) -> Iterator[tuple[Path, tuple[str, str, str, str]]]:
    """Yield directories of groups, each with the names of its files. A container may see its own group as the root."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines() if line.count(":") >= 2]
    except OSError:
        lines = []
    v2 = [path for number, _, path in lines if number == "0"]
    v1 = [path for _, kinds, path in lines if "memory" in kinds.split(",")]
    for top, paths, names in ((root, v2, V2), (root / "memory", v1, V1)):
        inner = top / paths[0].strip("/") if paths else top
        for place in (inner, *inner.parents):
            yield place, names
            if place == top:
                break


def _read(place: Path, limit: str, used: str, reclaimable: str, events: str) -> MemoryGroup | None:
    try:
        most, now = (place / limit).read_text().strip(), int((place / used).read_text())
        stat = _counts(place / "memory.stat")
        seen = _counts(place / events) if (place / events).is_file() else {}
        bound = None if most == "max" or int(most) >= MOST_BYTES else int(most)
        return MemoryGroup(bound, max(0, now - stat.get(reclaimable, 0)), seen.get("oom_kill", 0))
    except (OSError, ValueError):  # no such group, or a format we do not know: no limit
        return None


def _counts(file: Path) -> dict[str, int]:
    return {name: int(value) for name, value in map(str.split, file.read_text().splitlines())}
