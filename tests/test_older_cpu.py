"""`pytest --isa` hides the CPU's best instruction sets from the tests and from what they start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.older_cpu import visible, write_site

SETS = ("avx512_bf16", "avx512_vnni", "avx512", "avx2", "scalar", "avx512_bf16_emulated")


@pytest.mark.parametrize(
    ("best", "left"),
    [
        ("avx512", ["avx512", "avx2", "scalar", "avx512_bf16_emulated"]),
        ("avx2", ["avx2", "scalar"]),
        ("scalar", ["scalar"]),
    ],
)
def test_an_older_cpu_has_the_older_sets(best: str, left: list[str]) -> None:
    assert visible(SETS, best) == left


def test_a_process_that_a_test_starts_is_limited_too(tmp_path: Path) -> None:
    write_site(tmp_path, "scalar")
    code = "from quire.devices.registry import make_backend as make\nprint(make().name)\nmake(isa='avx2')"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("native scalar,")
    assert "isa 'avx2' cannot run on this CPU; choose one of: auto, scalar" in done.stderr
