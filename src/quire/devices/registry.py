"""The backends by name: the values of `--backend`, `--device` and `--isa`, and what makes each.

A backend's module is imported when it is first used, so a machine needs only what its own backend needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from quire.devices.choices import CPU, LibraryChoice
from quire.lazy import Lazy

if TYPE_CHECKING:
    import quire.devices.cpu.backend as cpu
    import quire.devices.cpu.machine as machine
    from quire.devices import foreign as foreign
    from quire.devices import selection as selection
    from quire.devices.choices import Choices
    from quire.devices.protocol import Backend
else:
    cpu = Lazy("quire.devices.cpu.backend")
    machine = Lazy("quire.devices.cpu.machine")
    foreign = Lazy("quire.devices.foreign")
    selection = Lazy("quire.devices.selection")

BackendName = Literal["auto", "native", "reference", "torch"]
GPU_NODE = Path("/dev/nvidiactl")
X86 = Literal["avx2", "avx512", "avx512_vnni", "avx512_bf16"]
Isa = Literal["auto", "scalar", X86, "neon", "neon_dot", "neon_i8mm", "neon_bf16"]


def make_backend(
    name: BackendName = "auto",
    threads: int | None = None,
    isa: Isa = "auto",
    device: str = "auto",
    batch_invariant: bool = True,
    made: Path | None = None,
    graphs: tuple[bool, tuple[str, ...], int | None] = (False, (), None),
    libraries: LibraryChoice = "auto",
) -> Backend:
    """Return the backend of that name; "auto" is the fastest for the device, and for the machine if that is "auto" too.

    `threads` None means one per core. `made` is an engine directory that may help. Raises ConfigError if the name is
    unknown, its library is not installed or the device cannot be had, EngineError if the machine cannot run it.
    """
    if not on_cpu(device, name):
        return selection.open_device(device, name, threads, batch_invariant, made, graphs, libraries)
    if name in ("auto", "native"):
        return cpu.NativeBackend(threads, isa)
    return selection.open_plain(name, threads, batch_invariant)


def on_cpu(device: str, backend: str) -> bool:
    """Tell whether options mean the CPU; `auto` is a GPU if there is one and what it needs is installed."""
    if device == "auto":
        return backend != "auto" or not GPU_NODE.exists() or not selection.has_extra()
    return device == "cpu"


def choices_of(device: str, backend: str) -> Choices:
    """Return the defaults of the device that options mean. ConfigError: there is no such device."""
    if on_cpu(device, backend):
        return selection.PLAIN if backend == "torch" else CPU
    return selection.choices_of(device, backend)


def device_of_rank(device: str, backend: str, index: int) -> str:
    """Return the device of a rank by its place on its machine."""
    return device if on_cpu(device, backend) else selection.of_rank(device, index)


def check_ranks(device: str, backend: str, count: int) -> None:
    """Raise ConfigError if a machine has fewer GPUs than ranks."""
    if count > 1 and not on_cpu(device, backend):
        selection.check_ranks(device, count)


def usable_threads() -> int:
    """Return the number of cores that this process may use."""
    return machine.usable_threads()
