"""Files made ahead of time: whole, bounded and checked; every kind of damage is one line that says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.devices.artifacts import MANIFEST, Artifacts
from quire.errors import ModelError

AGAIN = "run `quire build` again"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = Artifacts(tmp_path / "artifacts", {"target": "sm_90"}, "")
    made.add("a", b"first", {"n": 1})
    made.add("b", b"second" * 1000, {})
    made.add("c", b"first", {"n": 3})  # the bytes of another key
    made.save()
    return made.folder


def test_what_is_written_is_read(folder: Path) -> None:
    found = Artifacts.opened(folder, AGAIN)
    assert found.about(dict) == {"target": "sm_90"}
    assert [found.read(key) for key in found.files] == [b"first", b"second" * 1000, b"first"]
    assert [file.about for file in found.files.values()] == [{"n": 1}, {}, {"n": 3}]
    assert len([*folder.iterdir()]) == 3
    assert found.nbytes == 6010


@pytest.mark.parametrize("damage", ["changed", "cut", "longer", "gone", "folder"])
def test_a_damaged_file_is_refused_when_it_is_read(folder: Path, damage: str) -> None:
    found = Artifacts.opened(folder, AGAIN)
    path = folder / found.files["b"].sha256
    data = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage != "gone":
        changed = {"changed": b"S" + data[1:], "cut": data[:-1], "longer": data + b"!"}
        path.write_bytes(changed[damage])
    with pytest.raises(ModelError, match=f"{path.name}.*{AGAIN}"):
        found.read("b")
    assert found.read("a") == b"first"


def test_a_damaged_manifest_is_refused(folder: Path) -> None:
    path = folder / MANIFEST
    data = path.read_bytes()
    for damaged in (data[:-9], b"", b"[]", data.replace(b"sm_90", b"sm_80"), b"[" * 100_000):
        path.write_bytes(damaged)
        with pytest.raises(ModelError, match=AGAIN):
            Artifacts.opened(folder, AGAIN)
    path.unlink()
    with pytest.raises(ModelError, match=f"manifest.json.*{AGAIN}"):
        Artifacts.opened(folder, AGAIN)


def test_a_hostile_manifest_names_no_other_file_and_no_huge_one(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    for change in ({"sha256": "../../secret"}, {"nbytes": 1 << 40}, {"nbytes": -1}, {"more": 1}):
        made = Artifacts(folder, {}, "")
        content: Any = {
            "format": 1,
            "about": {},
            "files": {"a": {"sha256": "0" * 64, "nbytes": 5, "about": {}}},
        }
        content["files"]["a"] |= change
        made._content = content
        made.save()
        with pytest.raises(ModelError, match=AGAIN):
            Artifacts.opened(folder, AGAIN)


def test_another_version_is_told(folder: Path) -> None:
    made = Artifacts.opened(folder, AGAIN)
    made._content.format = 2
    made.save()
    with pytest.raises(ModelError, match=f"format 2, this version of Quire reads 1; {AGAIN}"):
        Artifacts.opened(folder, AGAIN)
