"""`quire kernels`: a table of what the compiler says, and plain errors."""

from __future__ import annotations

import json
import os
from importlib import import_module
from pathlib import Path

import pytest

from quire.cli import main
from quire.commands import kernels
from quire.config import EngineConfig
from quire.devices.registry import GPU_NODE
from tests.tiny import write_checkpoint


def test_unknown_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton", reason="the kernels of GPUs need triton")
    with pytest.raises(SystemExit) as ended:
        main(["kernels", "--target", "sm_70"])
    assert ended.value.code
    assert "--target must be one of sm_80" in capsys.readouterr().err


def test_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    row = {
        "launch": "products.product(*bf16:16, i32) [ROWS=64] warps 4 stages 3", "kernel": "product", "registers": 48,
        "spilled": 0, "shared_bytes": 102400, "cubin_bytes": 30000, "instruction": "wgmma bf16",
        "programs": 2, "narrow": 0,
    }  # fmt: skip
    monkeypatch.setattr(kernels, "compiled", lambda config, target: [row])
    main(["kernels"])
    title, line = capsys.readouterr().out.splitlines()
    assert title.split()[-4:] == ["programs", "narrow", "instruction", "signature"]
    assert line.split()[:9] == ["product", "48", "0", "100", "29", "2", "0", "wgmma", "bf16"]
    assert line.endswith("ROWS=64] warps 4 stages 3")
    main(["kernels", "--json"])
    assert json.loads(capsys.readouterr().out) == [row]


def test_a_model_s_kernels_are_those_of_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the kernels of GPUs need triton")
    jit = pytest.importorskip("quire.devices.cuda.jit")
    monkeypatch.setattr(jit, "compile_launch", lambda launch, target: (launch, target.name))
    monkeypatch.setattr(
        jit, "measured", lambda made: {"kernel": made[0].kernel.fn.__name__, "target": made[1]}
    )
    model = write_checkpoint(tmp_path, "llama", "bfloat16", num_hidden_layers=1)
    rows = kernels.compiled(EngineConfig.from_options(model=str(model), kv_cache_dtype="int8"), "sm_120")
    assert {"product", "attention", "merge", "norm", "sampled"} <= {row["kernel"] for row in rows}
    assert {row["target"] for row in rows} == {"sm_120"}
    attention = [str(row["launch"]) for row in rows if row["kernel"] == "attention"]
    assert all("BLOCK=64" in launch and "*i8:16" in launch for launch in attention)


def test_kernels_are_checked_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="the kernels of GPUs need triton")
    if not GPU_NODE.exists():
        with pytest.raises(SystemExit) as ended:
            main(["kernels", "--check"])
        assert ended.value.code == 2
        assert "there is no GPU" in capsys.readouterr().err
    model = str(write_checkpoint(tmp_path, "llama", "bfloat16", num_hidden_layers=1))
    command = [
        "kernels",
        "--check",
        "--model",
        model,
        "--device",
        "interpreter",
    ]
    main(command)
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("right  bits kept  ") for line in lines)
    assert any("Attend" in line for line in lines)
    verdict = import_module("quire.devices.cuda.selfcheck").Verdict(False, True)
    monkeypatch.setattr("quire.devices.cuda.parts.check_copies", lambda kv: verdict)
    with pytest.raises(SystemExit) as ended:
        main([*command, "--json"])
    assert ended.value.code == 1
    assert json.loads(capsys.readouterr().out)["copies of blocks"] == {"values": False, "bits": True}


def test_a_home_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton", reason="the kernels of GPUs need triton")
    jit = pytest.importorskip("quire.devices.cuda.jit")
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = "/proc/none/.triton"
        jit.find_cache()
        assert os.access(triton.knobs.cache.dir, os.W_OK)
