"""Devices by name, the values of `--device`: which one `auto` means, and what opens it. Loads torch for a GPU alone."""

from __future__ import annotations

import importlib.metadata
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quire.devices.artifacts import FOLDER
from quire.devices.choices import CPU, Choices, LibraryChoice
from quire.devices.registry import on_cpu
from quire.errors import ConfigError
from quire.lazy import Lazy, missing, need

if TYPE_CHECKING:
    import torch

    import quire.devices.cuda.admit as admit
    import quire.devices.cuda.aot as aot
    import quire.devices.cuda.backend as cuda
    import quire.devices.cuda.selfcheck as selfcheck
    import quire.devices.cuda.target as targets
    import quire.devices.reference.backend as reference
    import quire.devices.torch.backend as plain
    from quire.devices.protocol import Backend
else:
    aot, targets = Lazy("quire.devices.cuda.aot"), Lazy("quire.devices.cuda.target")
    admit = Lazy("quire.devices.cuda.admit")
    cuda, selfcheck = Lazy("quire.devices.cuda.backend"), Lazy("quire.devices.cuda.selfcheck")
    torch = Lazy("torch")
    plain = Lazy("quire.devices.torch.backend")
    reference = Lazy("quire.devices.reference.backend")

log = logging.getLogger("quire.devices")

TARGET = re.compile("sm_[0-9]{2,3}")
"""TARGET names an architecture that `quire build` compiles for; nothing runs there."""
KNOWN = re.compile("auto|cpu|interpreter|mps|(cuda|xpu)(:[0-9]{1,3})?|sm_[0-9]{2,3}")
NEVER_TRIED = {"hip", "rocm", "tpu", "hpu", "npu", "musa"}
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
    graphs=(1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 513, 32)),
    prepares=True,
)
INTERPRETER = Choices(block_size=64, launches=True, async_scheduling=True, graphs=(1, 2, 4, 8))
PLAIN = Choices(batch_invariant=False)
"""PLAIN are the choices of plain torch on the CPU."""
PLAIN_GPU = msgspec.structs.replace(
    GPU, max_num_batched_tokens=2048, launches=False, async_scheduling=False, batch_invariant=False, graphs=()
)
MPS = msgspec.structs.replace(PLAIN_GPU, gpu_memory_utilization=0.5, read_gbs=100.0, gflops=3000.0)
LEAST_CAPABILITY = (8, 0)
VERDICTS = Path(".cache/quire/kernels.json")
"""VERDICTS on kernels by device, in the user's home directory."""
LARGEST_GRAPH = 8192  # tokens
Graphs = tuple[bool, tuple[str, ...], int | None]
INSTEAD = "; --device cpu computes on the CPU"


def check_name(device: str) -> str:
    """Return the name of a device. ConfigError: Quire has no such device."""
    if KNOWN.fullmatch(device):
        return device
    if device.partition(":")[0] in NEVER_TRIED:
        raise ConfigError(f"--device {device} was never tried with Quire: choose cpu, cuda, xpu or mps")
    raise ConfigError(
        f"--device must be auto, cpu, cuda, cuda:N, xpu, xpu:N, mps or interpreter, got {device!r}"
    )


def choices_of(device: str, backend: str) -> Choices:
    """Return the defaults of a device other than the CPU. ConfigError: Quire has no such device."""
    if check_name(device) == "interpreter":
        return INTERPRETER
    if device == "mps":
        return MPS
    return PLAIN_GPU if is_plain(device, backend) else GPU


def is_plain(device: str, backend: str) -> bool:
    """Tell without imports whether plain torch computes on a GPU: another one than NVIDIA's, or without Triton."""
    return backend == "torch" or device.startswith(("xpu", "mps")) or bool(missing("triton"))


def has_extra() -> bool:
    """Tell without imports whether Triton and a torch for GPUs are installed."""
    return not missing("torch", "triton") and not importlib.metadata.version("torch").endswith("+cpu")


def of_rank(device: str, index: int) -> str:
    """Name the device of a rank by its place on its machine: the named one is the first rank's."""
    kind, _, first = check_name(device).replace("auto", "cuda").partition(":")
    return f"{kind}:{int(first or 0) + index}" if kind in ("cuda", "xpu") else device


def check_ranks(device: str, count: int) -> None:
    """Raise ConfigError if this machine has too few GPUs for as many ranks."""
    last = of_rank(device, count - 1)
    kind, _, number = last.partition(":")
    there = getattr(torch, kind).device_count() if number else 1
    if (number or kind == "mps") and there <= int(number or 1):
        raise ConfigError(
            f"{count} ranks need a GPU each, up to {last}, and {_there(kind, there)}: lower --tensor-parallel-size or "
            "--pipeline-parallel-size"
        )


def captured(own: Choices, eager: bool, given: tuple[str, ...], most: int | None) -> Choices:
    """Return a device's choices with the steps to capture that options ask for. ConfigError: a size is none."""
    words = [str(size) for size in given]
    if any(not word.isdecimal() or not 0 < int(word) <= LARGEST_GRAPH for word in words):
        raise ConfigError(
            f"--cudagraph-capture-sizes must be numbers of tokens from 1 to {LARGEST_GRAPH}, got {' '.join(words)}"
        )
    sizes = () if eager else tuple(sorted({*map(int, words)})) or own.graphs
    return msgspec.structs.replace(own, graphs=tuple(size for size in sizes if most is None or size <= most))


def open_device(
    device: str, backend: str, threads: int | None, batch_invariant: bool, made: Path | None, graphs: Graphs,
    libraries: LibraryChoice = "auto",
) -> Backend:  # fmt: skip
    """Open a GPU, its interpreter on the CPU, or a target of builds. ConfigError says why it cannot be had."""
    interpreted = check_name(device) == "interpreter"
    if backend not in ("auto", "torch") or (interpreted and backend == "torch"):
        raise ConfigError(
            f"--backend {backend} computes on the CPU, not on --device {device}: leave one of them out"
        )
    if missing("torch") or (interpreted and missing("triton")):
        raise ConfigError(f"--device {device} needs torch and triton: pip install 'quire-llm[cuda]'")
    if interpreted:
        ours = admit.Admission.of("none", selfcheck.Checks(None, batch_invariant), batch_invariant)
        return cuda.CudaBackend(None, captured(INTERPRETER, *graphs), threads, admission=ours)
    if TARGET.fullmatch(device):
        return aot.TargetBackend(targets.target_named(device), GPU, threads)
    if device.startswith(("xpu", "mps")):
        return plain.TorchBackend(
            threads, _other(device, batch_invariant), choices_of(device, backend), not batch_invariant
        )
    chosen = f"cuda:{_index(device)}"
    artifacts = None if made is None or not (made / FOLDER).exists() else made / FOLDER
    if is_plain(device, backend) and (backend == "torch" or artifacts is None):
        if backend == "auto":
            log.warning(
                "without triton, plain torch computes: pip install 'quire-llm[cuda]' for Quire's own kernels"
            )
        return plain.TorchBackend(threads, chosen, PLAIN_GPU, not batch_invariant)
    if device == "auto":
        log.info(
            "the device is %s, %s; --device cpu keeps to the CPU", chosen, torch.cuda.get_device_name(chosen)
        )
    checks = selfcheck.Checks(Path.home() / VERDICTS, batch_invariant)
    admission = admit.Admission.of(libraries, checks, batch_invariant)
    return cuda.CudaBackend(chosen, captured(GPU, *graphs), threads, artifacts, checks, admission)


def target_of(device: str, backend: str, target: str) -> str:
    """Name the device that builds for `target`, by default for this machine's own. ConfigError: there is none."""
    if on_cpu(device, backend) or backend == "torch" or device.startswith(("xpu", "mps", "interpreter")):
        if target:
            raise ConfigError(f"--target {target} is a GPU's architecture: give --device cuda too")
        return device
    need("quire build --device cuda", "torch", "triton")
    if not target:
        index = _index(device, "; --target sm_90 builds for a GPU that is elsewhere")
        target = targets.target_of(*torch.cuda.get_device_capability(index)).name
    return targets.target_named(target).name


def open_plain(name: str, threads: int | None, batch_invariant: bool) -> Backend:
    """Open a backend of the CPU that has no kernels of its own. ConfigError: there is none of that name."""
    if name == "reference":
        return reference.ReferenceBackend()
    if name != "torch":
        raise ConfigError(f"there is no backend {name!r}; choose auto, native, reference or torch")
    need("--backend torch", "torch")
    return plain.TorchBackend(threads, choices=CPU if batch_invariant else PLAIN, at_once=not batch_invariant)


def _other(device: str, batch_invariant: bool) -> str:
    """Find a GPU that is not NVIDIA's. ConfigError: there is none."""
    kind, _, number = device.partition(":")
    found = torch.backends.mps.is_available() if kind == "mps" else torch.xpu.is_available()
    if not found:
        raise ConfigError(
            f"torch {torch.__version__} finds no --device {kind}: install a build for it and its driver{INSTEAD}"
        )
    if kind == "mps" and batch_invariant:
        raise ConfigError("--batch-invariant sums in float64, which --device mps lacks: leave it out")
    if kind == "xpu" and int(number or 0) >= (count := torch.xpu.device_count()):
        raise ConfigError(f"there is no --device {device}: {_there(kind, count)}")
    return device


def _there(kind: str, count: int) -> str:
    """Say which GPUs this machine has."""
    return f"this machine has {kind}:0 " + ("alone" if count == 1 else f"to {kind}:{count - 1}")


def _index(device: str, instead: str = INSTEAD) -> int:
    """Find the number of a GPU that the kernels can use. ConfigError: there is none."""
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
        raise ConfigError(f"there is no --device {device}: {_there('cuda', count)}")
    try:
        capability: tuple[Any, ...] = torch.cuda.get_device_capability(index)
        torch.cuda.mem_get_info(index)  # uses it, as nothing before
    except RuntimeError as error:
        said = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
        raise ConfigError(
            f"cuda:{index} cannot be used now ({said}): see nvidia-smi for what holds it, or choose "
            f"another one by --device cuda:N{instead}"
        ) from error
    if capability < LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(index)
        raise ConfigError(
            f"{name} has compute capability {capability[0]}.{capability[1]}, and the kernels need 8.0 (A100) or "
            f"newer{instead}"
        )
    return index
