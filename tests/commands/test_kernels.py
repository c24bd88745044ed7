"""`quire kernels`: a table of what the compiler says, and plain errors."""

from __future__ import annotations

import json
import os

import pytest

from quire.cli import main
from quire.devices import selection


def test_unknown_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton", reason="the kernels of GPUs need triton")
    with pytest.raises(SystemExit) as ended:
        main(["kernels", "--target", "sm_70"])
    assert ended.value.code
    assert "--target must be one of sm_80" in capsys.readouterr().err


def test_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    row = {
        "case": "linear, 1 tokens", "kernel": "product", "registers": 48, "spilled": 0, "shared_bytes": 102400,
        "cubin_bytes": 30000, "instruction": "wgmma",
    }  # fmt: skip
    monkeypatch.setattr(selection, "compiled_kernels", lambda target: [row])
    main(["kernels"])
    title, line = capsys.readouterr().out.splitlines()
    assert title.split()[-2:] == ["KiB", "instruction"]
    assert line.split() == ["linear,", "1", "tokens", "product", "48", "0", "100", "29", "wgmma"]
    main(["kernels", "--json"])
    assert json.loads(capsys.readouterr().out) == [row]


def test_a_home_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton", reason="the kernels of GPUs need triton")
    launch = pytest.importorskip("quire.devices.cuda.launch")
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = "/proc/none/.triton"
        launch.find_cache()
        assert os.access(triton.knobs.cache.dir, os.W_OK)
