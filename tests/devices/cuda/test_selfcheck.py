"""The check of kernels at a first start: kernels that are broken on purpose are found, and plain torch stands in."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

import msgspec
import numpy as np
import torch

from quire.devices.cuda.arena import matrices
from quire.devices.cuda.jit import InterpretedLauncher
from quire.devices.cuda.launch import Launch
from quire.devices.cuda.parts import PARAMS
from quire.devices.cuda.selfcheck import MOST_DEVICES, Checks, Verdict, described
from quire.devices.cuda.target import INTERPRETER
from quire.devices.graph import widths
from quire.devices.ops import Embed
from quire.devices.protocol import Limits, ModelInput, StateInput
from quire.devices.registry import make_backend
from quire.devices.sampling import SlotSampling
from quire.devices.torch.run import TorchLogits
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
        if launch.kernel.__name__ == self.broken == "rope_store":
            launch.args["keys"].zero_()  # what it stores, not its result
        elif launch.kernel.__name__ == self.broken and out is not None:
            out.copy_(out * (1.01 if self.loose and len(out) > 20 else 1.0 if self.loose else 2.0))


def compiled(
    model: Path,
    run: Any,
    checks: Checks | None,
    quantized: Any = None,
    kv: Any = "bfloat16",
    adapters: int = 0,
) -> Any:
    backend: Any = make_backend(threads=1, device="interpreter")
    backend._run, backend.checks = run, checks
    loaded = load_model(model, backend, quantized=quantized)
    spec = inspect_model(model).kv_spec(kv)
    cache = backend.kv_cache(spec, 16, 16, *((4, 2) if spec.bytes_per_state(0) else ()))
    return backend.compile(loaded.graph, cache, Limits(80, 4, 8, adapters))


CASES = [
    ("gemma2", None, "fp8_e5m2", "Embed"),
    ("qwen3", "int8", "int8", "Attend"),
    ("mixtral", None, "bfloat16", "RunExperts"),
    ("qwen3_5", None, "bfloat16", "DeltaRule"),
    ("lfm2", None, "bfloat16", "Convolve"),
    ("deepseek_v32", None, "bfloat16", "Choose"),
    ("deepseek_v4", None, "int8", "StoreKeys"),
    ("qwen4", None, "bfloat16", "CompareParts"),
    ("glm5_next_text", None, "fp8_e5m2", "Mix"),
]


@pytest.mark.parametrize(("family", "quantized", "kv", "kind"), CASES)
def test_kernels_that_are_right_are_kept_so(
    tmp_path: Path, family: str, quantized: Any, kv: str, kind: str
) -> None:
    layers: dict[str, Any] = {"layer_types": ["conv", "full_attention"]} if family == "lfm2" else {}
    if family not in ("deepseek_v4", "qwen4", "glm5_next_text"):
        layers |= {"num_hidden_layers": 1 if family in ("deepseek_v32", "gemma2") else 2}
    model = write_checkpoint(tmp_path / "model", family, "bfloat16", **layers)
    about = None if quantized is None else scheme(quantized), kv
    run, file = Breaking(), tmp_path / "cache" / "kernels.json"
    compiled(model, run, Checks(file, True), *about)
    [verdicts] = msgspec.json.decode(file.read_bytes(), type=dict[str, dict[str, Verdict]]).values()
    assert {(verdict.accurate, verdict.exact) for verdict in verdicts.values()} == {(True, True)}, verdicts
    assert {"Attend", "Embed", "copies of blocks", kind} <= {name.partition("(")[0] for name in verdicts}
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


@pytest.mark.parametrize("broken", ["scanned", "convolved"])
def test_plain_torch_carries_states_where_kernels_are_wrong(tmp_path: Path, broken: str) -> None:
    """Several steps of two sequences, with tokens that are taken back."""
    model = write_checkpoint(tmp_path / "model", "qwen3_5", "bfloat16", num_hidden_layers=2)
    places, found = Checks(tmp_path / "kernels.json", True), list[Any]()
    for run, checks in ((Breaking(), None), (Breaking(broken), places)):
        made, rows = compiled(model, run, checks), list[Any]()
        for first, counts, taken, kept in ((0, (5, 9), (0, 0), (5, 7)), (9, (1, 2), (0, 2), (1, 2))):
            starts = np.array([5, 9]) if first else np.array([0, 0])
            rows.append(made.run(stateful(starts, np.array(counts), taken, kept)).numpy().copy())
        found.append(np.concatenate(rows))
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=0.05 * np.abs(found[0]).max())


def stateful(starts: Any, counts: Any, taken: Any, kept: Any) -> ModelInput:
    """A step of sequences with states, at some positions; `taken` open rows are replayed, and `kept` tokens stay."""
    cu_q, order = np.concatenate([[0], counts.cumsum()]).astype(np.int32), np.arange(2, dtype=np.int32)
    parts = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    positions = np.concatenate(parts).astype(np.int32)
    states = StateInput(
        order, np.array(taken, np.int32), np.array(kept, np.int32), np.zeros((0, 3), np.int32)
    )
    table = np.arange(4, dtype=np.int32).reshape(2, 2)
    return ModelInput(
        (positions * 5 % 90).astype(np.int32), positions, cu_q, (starts + counts).astype(np.int32), order, table,
        cu_q[1:] - 1, states=states,
    )  # fmt: skip


def test_the_host_draws_where_sampling_is_wrong(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    backends: list[Any] = [make_backend(threads=1, device="interpreter") for _ in range(2)]
    backends[1]._run, backends[1].checks = Breaking("sampled"), Checks(tmp_path / "kernels.json", True)
    logits = TorchLogits(torch.randn(len(PARAMS), 70, generator=torch.Generator().manual_seed(1)) * 3)
    logits.tensor[-1, 5] = np.inf
    masks = np.full((len(PARAMS), 3), 0xF0F0F0F0, np.uint32)
    masks[1] = 0
    drawn, rows = list[Any](), [*range(len(PARAMS))]
    with caplog.at_level(logging.WARNING):
        for backend in backends:
            sampler = backend.sampler(70)
            for slot, params in enumerate(PARAMS):
                sampler.set(slot, SlotSampling(slot, params, [1]))
            samples = sampler.sample(logits, rows, [1] * len(rows), None, masks).result()
            drawn.append((samples.tokens, samples.errors, backend._last_tokens[: len(rows)].tolist()))
    assert drawn[0] == drawn[1]
    assert "kernels are wrong, so plain torch computes" in caplog.text
    assert "sampling of 70 tokens" in caplog.text


def test_adapters_that_are_wrong_are_refused(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "llama", "bfloat16", num_hidden_layers=1)
    compiled(model, Breaking(), Checks(tmp_path / "right.json", True), adapters=1)
    with pytest.raises(ConfigError, match=r"adapters of torch\.bfloat16 are wrong: leave --enable-lora out"):
        compiled(model, Breaking("finished"), Checks(tmp_path / "wrong.json", True), adapters=1)


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


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_each_form_of_weights_has_verdicts_of_its_own(family: str, tmp_path: Path) -> None:
    model, backend = write_checkpoint(tmp_path, family), make_backend(threads=1, device="interpreter")
    found = list[set[str]]()
    for name in ("int8wo", "int4wo"):
        graph = load_model(model, backend, quantized=scheme(name)).graph
        sizes = widths(graph, inspect_model(model).kv_spec("bfloat16"))
        given = [(i, op) for i, op in enumerate(graph.ops[: graph.body]) if not isinstance(op, Embed)]
        packed = [(i, op) for i, op in given if any(not weight.dtype for weight in matrices(op))]
        found.append({described(op, i, sizes) for i, op in packed})
        assert {name.split("(")[0] for name in found[-1]} >= {"RunExperts", "Linear"}
    assert not found[0] & found[1]
