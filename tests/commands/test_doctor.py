"""`quire doctor` on this machine, and where parts of one are missing or broken."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

import quire as package
from quire.commands.doctor import _kernels, diagnose
from tests.hub_server import quire


def test_the_machine_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-secret")
    monkeypatch.setenv("QUIRE_API_KEY", "a-secret")
    done, table = quire("doctor", "--json"), quire("doctor")
    assert (done.returncode, done.stderr, table.returncode, table.stderr) == (0, "", 0, "")
    found = json.loads(done.stdout)
    assert found["quire"] == package.__version__
    assert platform.python_version() in found["python"]
    assert found["native_module"].startswith("loaded, for ")
    assert found["instruction_set"] in found["native_module"]
    assert 1 <= found["threads"]["used"] <= found["threads"]["cores"]
    assert set(found["packages"]) >= {"torch", "transformers", "ray", "triton"}
    assert found["cache"]["free"] >= 0
    assert found["config_file"] == "none"
    assert isinstance(found["advice"], list)
    assert "instruction set" in table.stdout
    assert "a-secret" not in done.stdout + table.stdout


def test_a_broken_config_file_is_named_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "quire.yaml").write_text("threads: 2\n")
    assert json.loads(quire("doctor", "--json").stdout)["config_file"] == str(tmp_path / "quire.yaml")
    for text in ("a: [", "no-such-option: 3\n", "doctor: {no: 1}\n"):
        (tmp_path / "quire.yaml").write_text(text)
        done = quire("doctor", "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["config_file"].startswith("broken: ")
        assert any("config file" in line for line in found["advice"])


def test_a_missing_native_module_is_told() -> None:
    code = "import sys; sys.modules['quire._native'] = None; from quire.cli import main; main(['doctor', '--json'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["native_module"].startswith("unknown: ")
    assert any("native module does not load" in line for line in found["advice"])


def test_a_system_without_files_or_with_strange_ones(tmp_path: Path) -> None:
    found = diagnose(tmp_path)
    assert (found["memory"], found["cgroup"], found["huge_pages"]) == ({}, {}, None)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: x kB\n")
    (tmp_path / "sys/fs/cgroup/cpu.max").mkdir(parents=True)
    pages = tmp_path / "sys/kernel/mm/transparent_hugepage"
    pages.mkdir(parents=True)
    (pages / "enabled").write_text("always madvise [never]\n")
    found = diagnose(tmp_path)
    assert found["memory"].startswith("unknown: ValueError")
    assert found["cgroup"]["cpu.max"].startswith("unknown: ")
    assert any("huge pages are off: `echo madvise" in line for line in found["advice"])
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 100 kB\n")
    assert any("little memory" in line for line in diagnose(tmp_path)["advice"])


def test_verdicts_on_kernels_of_gpus_are_shown(tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    assert _kernels(file) == {}
    right, wrong = {"accurate": True, "exact": True}, {"accurate": True, "exact": False}
    libraries = {"c": {**wrong, "sizes": [1, 8]}, "d": {**right, "sizes": []}}
    file.write_text(json.dumps({"H100": {"a": right, "b": wrong}, "A100": {"a": right}, "torch": libraries}))
    shown = {"H100": "2 checked, b failed", "A100": "1 checked, none failed", "torch": "2 tried, serving: c"}
    assert _kernels(file) == shown
