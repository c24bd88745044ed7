"""The device by name: what `auto` means, what each device decides, and one line for a device that cannot be had."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM
from quire.config import CacheConfig, EngineConfig, SchedulerConfig
from quire.devices import registry, selection
from quire.devices.choices import CPU, DECIDED
from quire.devices.registry import choices_of, device_of_rank, make_backend, on_cpu
from quire.errors import ConfigError


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("hip", "never tried"),
        ("tpu:1", "never tried"),
        ("mps:1", "must be auto, cpu, cuda"),
        ("gpu", "must be auto, cpu, cuda"),
        ("cuda:x", "must be auto, cpu, cuda"),
        ("cuda:-1", "must be auto, cpu, cuda"),
        ("CUDA", "must be auto, cpu, cuda"),
        ("", "must be auto, cpu, cuda"),
    ],
)
def test_other_devices_are_refused_by_name(device: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig.from_options(device=device)
    with pytest.raises(ConfigError, match=says):
        make_backend(device=device)


class Cuda:
    """A stand-in for torch.cuda on a machine with GPUs."""

    def __init__(self, count: int = 1, capability: tuple[int, int] = (9, 0), fault: str = "") -> None:
        self._count, self._capability, self._fault = count, capability, fault

    def is_available(self) -> bool:
        return self._count > 0

    def device_count(self) -> int:
        return self._count

    def get_device_capability(self, index: int) -> tuple[int, int]:
        return self._capability

    def get_device_name(self, index: Any) -> str:
        return "Stand-in"

    def mem_get_info(self, index: Any) -> tuple[int, int]:
        if self._fault:
            raise RuntimeError(self._fault)
        return 1 << 34, 1 << 34

    def empty_cache(self) -> None:
        pass


def has_gpus(monkeypatch: pytest.MonkeyPatch, cuda: Cuda, version: str | None = "13.0") -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch, "cuda", cuda)


def test_a_device_that_cannot_be_had_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")

    def refused(device: str, says: str, backend: Any = "auto") -> None:
        with pytest.raises(ConfigError, match=says) as caught:
            make_backend(backend, device=device)
        assert "\n" not in str(caught.value)

    refused("cuda", "leave one of them out", "native")
    has_gpus(monkeypatch, Cuda(), None)
    refused("cuda", "the CPU alone.*--device cpu")
    has_gpus(monkeypatch, Cuda(0))
    refused("cuda", "nvidia-smi")
    has_gpus(monkeypatch, Cuda(2))
    refused("cuda:9", "there is no --device cuda:9: this machine has cuda:0 to cuda:1")
    has_gpus(monkeypatch, Cuda(1))
    refused("cuda:1", "this machine has cuda:0 alone")
    has_gpus(monkeypatch, Cuda(1, (7, 5)))
    refused("cuda", "compute capability 7.5.*8.0")
    busy = "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nDevice-side assertions are off."
    has_gpus(monkeypatch, Cuda(2, fault=busy))
    refused(
        "cuda:1", r"cuda:1 cannot be used now \(CUDA error: .* unavailable\): see nvidia-smi.*--device cpu"
    )


def test_more_ranks_than_gpus_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpus(monkeypatch, Cuda(2))
    monkeypatch.setattr(torch, "xpu", Other(1))
    monkeypatch.setattr(torch.backends, "mps", Other(1))

    def refused(says: str, **options: Any) -> None:
        with pytest.raises(ConfigError, match=says) as caught:
            LLM(backend="torch", **options)
        assert "\n" not in str(caught.value)

    refused(
        "4 ranks need a GPU each, up to cuda:3, and this machine has cuda:0 to cuda:1: lower tensor_parallel_size",
        device="cuda",
        tensor_parallel_size=4,
    )
    refused("2 ranks .* up to cuda:2, and", device="cuda:1", pipeline_parallel_size=2)
    refused("2 ranks .* up to xpu:1, and this machine has xpu:0 alone", device="xpu", tensor_parallel_size=2)
    refused("2 ranks .* up to mps, and this machine has mps:0 alone", device="mps", tensor_parallel_size=2)
    registry.check_ranks("cuda", "auto", 2)
    registry.check_ranks("interpreter", "auto", 8)
    registry.check_ranks("cpu", "auto", 8)
    has_gpus(monkeypatch, Cuda(), None)
    refused("the CPU alone", device="cuda", tensor_parallel_size=2)


class Other:
    """A stand-in for torch.xpu and torch.backends.mps."""

    def __init__(self, count: int) -> None:
        self._count = count

    def is_available(self) -> bool:
        return self._count > 0

    def device_count(self) -> int:
        return self._count


def test_plain_torch_computes_on_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("xpu", "xpu:0", "mps"):
        with pytest.raises(ConfigError, match=f"finds no --device {device[:3]}.*--device cpu") as caught:
            make_backend(device=device)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="leave one of them out"):
        make_backend("native", device="xpu")
    monkeypatch.setattr(torch, "xpu", Other(2))
    monkeypatch.setattr(torch.backends, "mps", Other(1))
    with pytest.raises(ConfigError, match="there is no --device xpu:2: this machine has xpu:0 to xpu:1"):
        make_backend(device="xpu:2")
    with pytest.raises(ConfigError, match="float64, which --device mps lacks: leave it out"):
        make_backend(device="mps", batch_invariant=True)
    for device in ("xpu:1", "mps"):
        backend = make_backend(device=device, batch_invariant=False)
        assert backend.name.startswith(f"torch {device}, ")
        assert "--batch-invariant" in backend.caveat
        assert not backend.choices.launches
        assert not EngineConfig.from_options(device=device).device.batch_invariant
        assert EngineConfig.from_options(device=device, batch_invariant=True).device.batch_invariant
    assert device_of_rank("xpu", "auto", 1) == "xpu:1"
    assert device_of_rank("mps", "auto", 1) == "mps"


def test_without_triton_plain_torch_computes_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has_gpus(monkeypatch, Cuda(2))
    assert make_backend("torch", device="cuda:1").name.startswith("torch cuda:1")
    assert caplog.text == ""
    find = selection.importlib.util.find_spec
    lacking = lambda name, *rest: None if name == "triton" else find(name, *rest)  # noqa: E731
    monkeypatch.setattr(selection.importlib.util, "find_spec", lacking)
    assert make_backend(device="cuda").name.startswith("torch cuda:0")
    assert "pip install 'quire-llm[cuda]' for Quire's own kernels" in caplog.text
    for options in ({"device": "cuda"}, {"device": "cuda", "backend": "torch"}):
        config = EngineConfig.from_options(**options)
        assert (config.scheduler.async_scheduling, config.device.batch_invariant) == (False, False)


@pytest.mark.parametrize("missing", ["torch", "triton"])
def test_without_the_extra_a_device_names_it(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    find = selection.importlib.util.find_spec
    lacking = lambda name, *rest: None if name == missing else find(name, *rest)  # noqa: E731
    monkeypatch.setattr(selection.importlib.util, "find_spec", lacking)
    assert not selection.has_extra()
    for device in ("cuda", "interpreter"):
        with pytest.raises(ConfigError, match=r"pip install 'quire-llm\[cuda\]'"):
            make_backend(device=device)


def test_auto_is_a_gpu_only_with_a_device_and_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(registry, "GPU_NODE", tmp_path / "nvidiactl")
    monkeypatch.setattr(selection, "has_extra", lambda: True)
    assert on_cpu("auto", "auto")
    (tmp_path / "nvidiactl").touch()
    assert not on_cpu("auto", "auto")
    assert on_cpu("auto", "native")
    assert on_cpu("cpu", "auto")
    assert device_of_rank("auto", "auto", 3) == "cuda:3"
    assert device_of_rank("cuda", "auto", 1) == "cuda:1"
    assert device_of_rank("cuda:2", "auto", 1) == "cuda:3"
    assert device_of_rank("cpu", "auto", 1) == "cpu"
    monkeypatch.setattr(selection, "has_extra", lambda: False)
    assert on_cpu("auto", "auto")
    assert device_of_rank("auto", "auto", 3) == "auto"


def test_a_device_decides_what_options_leave_open() -> None:
    for device, block_size in (("cpu", 16), ("auto", 16), ("cuda", 64), ("interpreter", 64)):
        config, own = EngineConfig.from_options(device=device), choices_of(device, "auto")
        assert config.cache.block_size == own.block_size == block_size
        assert config.cache.gpu_memory_utilization == own.gpu_memory_utilization
        assert config.scheduler.max_num_seqs == own.max_num_seqs
        assert config.scheduler.async_scheduling == own.async_scheduling
        assert config.scheduler.max_num_batched_tokens == own.max_num_batched_tokens
    given = EngineConfig.from_options(device="cuda", block_size=16, max_num_seqs=256)
    assert (given.cache.block_size, given.scheduler.max_num_seqs) == (16, 256)
    sections = EngineConfig(cache=CacheConfig(), scheduler=SchedulerConfig())
    plain = sections.scheduler.max_num_batched_tokens, sections.scheduler.max_num_seqs
    plain += sections.cache.gpu_memory_utilization, sections.cache.block_size
    plain += sections.scheduler.async_scheduling, sections.device.batch_invariant
    assert plain == tuple(getattr(CPU, name) for name in DECIDED) == (1024, 256, 0.5, 16, False, True)
    threads = make_backend(threads=3).choices
    assert (threads.logit_rows, threads.read_gbs, threads.gflops) == (64, 10.0, 150.0)


def test_the_command_line_leaves_it_to_the_device_too() -> None:
    code = (
        "import sys, quire.commands.plan as plan; from quire.cli import main\n"
        "def run(config, options): print(config.cache.block_size, config.scheduler.max_num_seqs)\n"
        "object.__setattr__(plan.COMMAND, 'run', run)\n"
        "main(['plan', *sys.argv[1:]])"
    )
    for args, found in (
        ((), "16 256"),
        (("--device", "cuda"), "64 1024"),
        (("--device", "cuda", "--block-size", "16"), "16 1024"),
        (("--max-num-seqs", "7"), "16 7"),
    ):
        result = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
        assert result.stdout.split() == found.split(), result.stderr


def test_a_plain_run_imports_neither_torch_nor_triton() -> None:
    code = "import sys; from quire import LLM; LLM(device='cpu', max_model_len=64).generate(['A'], use_tqdm=False)"
    code += "\nprint({'torch', 'triton', 'quire.devices.selection'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_a_device_is_an_argument_of_an_llm() -> None:
    with pytest.raises(ConfigError, match="device must be auto, cpu"):
        LLM(device="fpga")
