"""Devices by name, the values of `--device`: which one `auto` means, and what opens it. Loads torch for a GPU alone."""

from __future__ import annotations

import importlib.metadata
import logging
import re
from typing import TYPE_CHECKING, Any

from quire.devices.choices import Choices
from quire.errors import ConfigError
from quire.lazy import Lazy, missing, need

if TYPE_CHECKING:
    import torch

    import quire.devices.cuda.backend as cuda
    import quire.devices.cuda.catalog as catalog
    from quire.devices.protocol import Backend
else:
    cuda = Lazy("quire.devices.cuda.backend")
    torch = Lazy("torch")
    catalog = Lazy("quire.devices.cuda.catalog")

log = logging.getLogger("quire.devices")

KNOWN = re.compile("auto|cpu|interpreter|cuda(:[0-9]{1,3})?")
NEVER_TRIED = {"xpu", "mps", "hip", "rocm", "tpu", "hpu", "npu", "musa"}
GPU = Choices(
    max_num_batched_tokens=8192,
    max_num_seqs=1024,
    gpu_memory_utilization=0.9,
    block_size=64,
    logit_rows=256,
    read_gbs=1500.0,
    gflops=200_000.0,
    shared_memory=False,
    launches=True,
    async_scheduling=True,
)
INTERPRETER = Choices(block_size=64, launches=True, async_scheduling=True)
LEAST_CAPABILITY = (8, 0)


def check_name(device: str) -> str:
    """Return the name of a device. ConfigError: Quire has no such device."""
    if KNOWN.fullmatch(device):
        return device
    if device.partition(":")[0] in NEVER_TRIED:
        raise ConfigError(
            f"--device {device} was never tried with Quire: choose cpu, or cuda on NVIDIA's GPUs"
        )
    raise ConfigError(f"--device must be auto, cpu, cuda, cuda:N or interpreter, got {device!r}")


def choices_of(device: str) -> Choices:
    """Return the defaults of a device other than the CPU. ConfigError: Quire has no such device."""
    return INTERPRETER if check_name(device) == "interpreter" else GPU


def has_extra() -> bool:
    """Tell without imports whether Triton and a torch for GPUs are installed."""
    return not missing("torch", "triton") and not importlib.metadata.version("torch").endswith("+cpu")


def of_rank(device: str, index: int) -> str:
    """Name the device of a rank by its place on its machine."""
    return f"cuda:{index}" if check_name(device) in ("auto", "cuda") else device


def open_device(device: str, backend: str, threads: int | None) -> Backend:
    """Open a GPU, or its interpreter on the CPU. ConfigError says why it cannot be had."""
    if backend != "auto":
        raise ConfigError(
            f"--backend {backend} computes on the CPU, not on --device {device}: leave one of them out"
        )
    if missing("torch", "triton"):
        raise ConfigError(f"--device {device} needs torch and triton: pip install 'quire-llm[cuda]'")
    if check_name(device) == "interpreter":
        return cuda.CudaBackend(None, INTERPRETER, threads)
    chosen = f"cuda:{_index(device)}"
    if device == "auto":
        log.info(
            "the device is %s, %s; --device cpu keeps to the CPU", chosen, torch.cuda.get_device_name(chosen)
        )
    return cuda.CudaBackend(chosen, GPU, threads)


def compiled_kernels(target: str) -> list[dict[str, Any]]:
    """Compile the kernels of GPUs for an architecture, which need not be there: what each takes, as plain values.

    ConfigError if the architecture is unknown, or a library is not installed.
    """
    need("quire kernels", "torch", "triton")
    return catalog.compile_all(target)


def _index(device: str) -> int:
    """Find the number of a GPU that the kernels can use. ConfigError: there is none."""
    instead = "; --device cpu computes on the CPU"
    if torch.version.cuda is None:
        build = "AMD's GPUs, which were never tried" if torch.version.hip else "the CPU alone"
        raise ConfigError(
            f"the installed torch {torch.__version__} is for {build}: install one for CUDA (pip install "
            f"'quire-llm[cuda]' from PyTorch's index){instead}"
        )
    if not torch.cuda.is_available():
        raise ConfigError(f"torch finds no NVIDIA GPU: check the driver with nvidia-smi{instead}")
    index, count = int(device.partition(":")[2] or 0), torch.cuda.device_count()
    if index >= count:
        there = "cuda:0 alone" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise ConfigError(f"there is no --device {device}: this machine has {there}")
    capability: tuple[Any, ...] = torch.cuda.get_device_capability(index)
    if capability < LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(index)
        raise ConfigError(
            f"{name} has compute capability {capability[0]}.{capability[1]}, and the kernels need 8.0 (A100) or "
            f"newer{instead}"
        )
    return index
