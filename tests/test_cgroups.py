"""Limits of memory in trees of control groups as v1 and v2 lay them out."""

from __future__ import annotations

from pathlib import Path

from quire.cgroups import MemoryGroup, memory_groups, tightest


def write_v2(place: Path, limit: str, used: int, reclaimable: int = 0, kills: int = 0) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / "memory.max").write_text(f"{limit}\n")
    (place / "memory.current").write_text(f"{used}\n")
    (place / "memory.stat").write_text(f"anon 5\ninactive_file {reclaimable}\n")
    (place / "memory.events").write_text(f"low 0\nhigh 0\nmax 7\noom 3\noom_kill {kills}\n")


def write_v1(place: Path, limit: int, used: int, reclaimable: int = 0, kills: int | None = 0) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (place / "memory.usage_in_bytes").write_text(f"{used}\n")
    (place / "memory.stat").write_text(f"cache 5\ntotal_inactive_file {reclaimable}\n")
    if kills is not None:  # old kernels do not count
        (place / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")


def own(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cgroup-of-self"
    path.write_text(text)
    return path


def test_the_group_that_leaves_the_fewest_bytes_counts(tmp_path: Path) -> None:
    root, me = tmp_path / "fs", own(tmp_path, "0::/system.slice/quire.service\n")
    write_v2(root / "system.slice", "1000", 700, 100)
    write_v2(root / "system.slice" / "quire.service", "max", 500, 50, 2)
    inner, outer = memory_groups(root, me)
    assert inner == MemoryGroup(None, 450, 2)
    assert outer == MemoryGroup(1000, 600, 0)
    assert tightest([inner, outer]) == outer
    assert outer.left == 400
    write_v2(root / "system.slice" / "quire.service", "500", 480)
    assert tightest(memory_groups(root, me)) == MemoryGroup(500, 480, 0)


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    write_v2(root, "1000", 2000)
    for text in ("0::/\n", "0::/../../elsewhere\n", "0::/docker/of-the-host\n", "", "garbage\n"):
        group = tightest(memory_groups(root, own(tmp_path, text)))
        assert group is not None, text
        assert (group.limit, group.left) == (1000, 0)
    assert tightest(memory_groups(root, tmp_path / "absent")) is not None


def test_version_1_beside_version_2(tmp_path: Path) -> None:
    root, me = tmp_path / "fs", own(tmp_path, "9:pids:/a\n4:cpu,memory:/a/b\n0::/\n")
    write_v1(root / "memory" / "a" / "b", 1 << 62, 900, 100, None)
    write_v1(root / "memory" / "a", 800, 500)
    write_v1(root / "memory", 1 << 62, 5000)
    assert memory_groups(root, me) == [
        MemoryGroup(None, 800, 0),
        MemoryGroup(800, 500, 0),
        MemoryGroup(None, 5000, 0),
    ]


def test_what_is_no_group_is_left_out(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    write_v2(root / "a", "much", 5)
    (root / "memory.max").write_text("5\n")  # and nothing beside it
    assert memory_groups(root, own(tmp_path, "0::/a\n")) == []
    assert tightest([]) is None
