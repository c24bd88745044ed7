"""bench/gpu.py without a GPU: every stage in the interpreter at tiny sizes, and verdicts that see what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

from bench import gpu
from bench.visit import kernels, pack
from bench.visit.cases import Case
from bench.visit.place import open_place
from bench.visit.shapes import TINY
from quire.devices.artifacts import Artifacts
from quire.devices.cuda.cubins import Kernel, about_of
from quire.devices.cuda.target import TARGETS


def test_a_visit_without_a_gpu_finds_nothing_wrong(tmp_path: Path) -> None:
    command = [
        sys.executable,
        gpu.__file__,
        "--check",
        "--seconds",
        "60",
        "--device",
        "interpreter",
        "--out",
        tmp_path,
    ]
    told = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout[-3000:] + told.stderr[-3000:]
    found = json.loads((tmp_path / "gpu.json").read_text())["stages"]
    assert [*found] == [*gpu.STAGES]
    assert [row for stage in found.values() for row in stage["rows"] if row["ok"] is False] == []
    assert found["environment"]["state"] == "done"
    assert any(row["ok"] for row in found["bits"]["rows"])
    assert "right" in told.stdout


def test_what_is_wrong_is_reported_and_other_checks_go_on() -> None:
    rows = list[dict[str, Any]]()
    place = open_place("interpreter", rows.append, False, 60.0, {}, (0, 1))
    x = place.draw(70, 8)

    def sized(picked: Any) -> Any:
        return x[picked] * (1 if len(x[picked]) > 17 else 2)

    def unwritten(picked: Any) -> Any:
        return place.empty(*x[picked].shape)

    def failing(picked: Any) -> Any:
        raise RuntimeError("no kernel image")

    for name, compute in {"sized": sized, "unwritten": unwritten, "failing": failing}.items():
        make = partial(Case, name, 70, compute, lambda picked: x[picked].double())
        place.attempt(name, kernels.row_bits, place, make)
    assert [(row["name"], row["ok"]) for row in rows] == [
        ("sized", False), ("unwritten", False), ("failing", False)
    ]  # fmt: skip
    assert rows[0]["differs_at"] == [1, 17]
    assert "no kernel image" in rows[2]["error"]


def test_packed_kernels_are_those_that_an_engine_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cubin(launch: Any, target: Any) -> tuple[bytes, Kernel]:
        name = launch.kernel.fn.__name__
        return b"\x7fELF" + name.encode(), Kernel(name, [], 0, launch.shape.warps)

    monkeypatch.setattr(pack, "cubin", cubin)
    made = Artifacts(tmp_path / "artifacts", about_of(TARGETS["sm_90"]), "")
    for form in ({}, {"kv_cache_dtype": "fp8"}):
        pack.compile_form(made, "sm_90", form, TINY)
    made.save()
    assert {made.about(Kernel, key).name for key in made.files} >= {"attention", "product", "norm", "sampled"}
    assert any("fp8e4nv" in key for key in made.files)
    rows = list[dict[str, Any]]()
    pack.cubins(open_place("interpreter", rows.append, False, 60.0, {}, (0, 1)), tmp_path)
    assert [row["ok"] for row in rows] == [True]


def hang(*args: Any) -> None:
    time.sleep(600)


def test_a_stage_that_hangs_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "environment", hang)
    stage: dict[str, Any] = {"rows": []}
    options = Namespace(check=True, layers=1, scale=1.0, target="sm_90")
    assert [*gpu.run_stage("environment", "interpreter", 0.5, options, {}, stage)] == []
    assert stage["state"] == "cut at its limit"


def test_the_native_module_is_built_once_for_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands, source = list[list[str]](), tmp_path / "src" / "quire"
    source.mkdir(parents=True)
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "PACKED", tmp_path)
    monkeypatch.setattr(gpu, "SITE", tmp_path / "site")
    monkeypatch.setattr(gpu.sys, "path", [*sys.path])

    def run(command: list[str], **more: Any) -> Any:
        if "import quire._native" in command:
            return Namespace(returncode=1)  # nothing is installed
        commands.append(command)
        (tmp_path / "site" / "quire").mkdir(parents=True)
        (tmp_path / "site" / "quire" / "_native.abi3.so").write_text("made")
        return Namespace(returncode=0)

    monkeypatch.setattr(gpu.subprocess, "run", run)
    assert gpu.prepare() == gpu.prepare() == ""
    assert [command[-1] for command in commands] == [str(tmp_path)]
    assert (source / "_native.abi3.so").read_text() == "made"
    monkeypatch.setattr(gpu, "NEEDED", ["numpy", "no_such_package"])
    assert "no_such_package" in gpu.prepare()


def test_stages_are_picked_by_name() -> None:
    assert gpu.picked("bits", "cuda", False) == ["bits"]
    assert gpu.picked("engine", "cuda", False) == ["ceilings", "engine"]
    assert gpu.picked("engine", "cuda", True) == ["engine"]
    assert "table" not in gpu.picked("", "cuda", True)
