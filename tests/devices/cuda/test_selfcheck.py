"""The check of kernels at a first start: kernels that are broken on purpose are found, and plain torch stands in."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

import msgspec
import numpy as np

from quire.devices.cuda.jit import InterpretedLauncher
from quire.devices.cuda.launch import Launch
from quire.devices.cuda.selfcheck import MOST_DEVICES, Checks, Verdict
from quire.devices.cuda.target import INTERPRETER
from quire.devices.protocol import Limits
from quire.devices.registry import make_backend
from quire.errors import ConfigError
from quire.weights.schemes import scheme
from tests.devices.cuda.test_fuse import STEP
from tests.models import inspect_model, load_model
from tests.tiny import write_checkpoint


class Breaking:
    """The interpreter with one kernel that is wrong, or whose results follow the number of rows."""

    target = INTERPRETER

    def __init__(self, broken: str = "", loose: bool = False) -> None:
        self.broken, self.loose, self.count = broken, loose, 0

    def __call__(self, launch: Launch) -> None:
        self.count += 1
        InterpretedLauncher()(launch)
        out = launch.args.get("out")
        if launch.kernel.__name__ == self.broken and out is not None:
            out.mul_(1.01 if self.loose and len(out) > 20 else 1.0 if self.loose else 2.0)


def compiled(
    model: Path, run: Any, checks: Checks | None, quantized: Any = None, kv: Any = "bfloat16"
) -> Any:
    backend: Any = make_backend(threads=1, device="interpreter")
    backend._run, backend.checks = run, checks
    loaded = load_model(model, backend, quantized=quantized)
    cache = backend.kv_cache(inspect_model(model).kv_spec(kv), 16, 16)
    return backend.compile(loaded.graph, cache, Limits(80, 4, 8))


CASES = [("gemma2", None, "fp8_e5m2"), ("qwen3", "int8", "int8"), ("mixtral", None, "bfloat16")]


@pytest.mark.parametrize(("family", "quantized", "kv"), CASES)
def test_kernels_that_are_right_are_kept_so(tmp_path: Path, family: str, quantized: Any, kv: str) -> None:
    model = write_checkpoint(tmp_path / "model", family, "bfloat16", num_hidden_layers=2)
    about = None if quantized is None else scheme(quantized), kv
    run, file = Breaking(), tmp_path / "cache" / "kernels.json"
    compiled(model, run, Checks(file, True), *about)
    [verdicts] = msgspec.json.decode(file.read_bytes(), type=dict[str, dict[str, Verdict]]).values()
    assert {(verdict.accurate, verdict.exact) for verdict in verdicts.values()} == {(True, True)}, verdicts
    assert {"Attend", "StoreKV", "Embed"} <= {name.partition("(")[0] for name in verdicts}
    seen = run.count
    compiled(model, run, Checks(file, True), *about)
    assert run.count == seen, "it was checked again"


@pytest.mark.parametrize("broken", ["product", "norm", "attention", "rope_store"])
def test_plain_torch_stands_in_for_a_kernel_that_is_wrong(
    tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_checkpoint(tmp_path / "model", "gemma2", "bfloat16", num_hidden_layers=1)
    wanted = compiled(model, Breaking(), None).run(STEP).numpy()
    with caplog.at_level(logging.WARNING):
        made = compiled(model, Breaking(broken), Checks(tmp_path / "kernels.json", True))
    assert "kernels are wrong, so plain torch computes" in caplog.text
    assert "`quire doctor --json`" in caplog.text
    np.testing.assert_allclose(made.run(STEP).numpy(), wanted, rtol=0, atol=0.05 * np.abs(wanted).max())


def test_bits_that_follow_other_rows_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_checkpoint(tmp_path / "model", "llama", "bfloat16", num_hidden_layers=1)
    with pytest.raises(ConfigError, match=r"Linear\(.*depend on those beside them: --no-batch-invariant"):
        compiled(model, Breaking("product", loose=True), Checks(tmp_path / "kernels.json", True))
    with caplog.at_level(logging.WARNING):
        compiled(model, Breaking("product", loose=True), Checks(tmp_path / "kernels.json", False)).run(STEP)
    assert "answers may depend on requests beside them, by the kernels of" in caplog.text


def test_a_file_of_verdicts_is_bounded_and_a_bad_one_made_anew(tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    for data in (b"{", b'{"a": {"b": {"accurate": 1}}}', b"[]", b" " * (2 << 20)):
        file.write_bytes(data)
        assert Checks(file, True).of("a") == {}
    for number in range(MOST_DEVICES + 3):
        Checks(file, True).add(f"device {number}", {"x": Verdict(True, True)})
    assert Checks(file, True).of("device 2") == {}
    assert Checks(file, True).of("device 3") == {"x": Verdict(True, True)}
    Checks(tmp_path / "kernels.json" / "under", True).add("a", {})
