"""Launches of kernels: what a launch is, what its compiled kernel depends on, and what runs it. Needs no compiler.

Every function that launches takes a Launcher first, so that one backend works on a device, in the interpreter, and for
cubins that are compiled ahead of time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from quire.devices.cuda.target import Target
from quire.devices.cuda.tiles import Shape

ONE = Shape()
TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5", torch.int64: "i64", torch.int32: "i32",
    torch.int8: "i8", torch.uint8: "u8", torch.bool: "u1",
}  # fmt: skip
"""TYPES are the compiler's names of the types of tensors."""
ALIGNED = 16
"""ALIGNED bytes of a pointer, or whole parts of an integer, are promised to the compiler where a launch has them."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel over a grid. Arguments are tensors, numbers or None; constants are compiled in."""

    kernel: Any
    grid: tuple[int, int, int]
    args: dict[str, Any]
    constants: dict[str, Any]
    shape: Shape = ONE


class Launcher(Protocol):
    """Runs launches in order, on tensors of one device; `target` chooses their tiles."""

    @property
    def target(self) -> Target: ...

    def __call__(self, launch: Launch) -> None: ...


def launch(
    run: Launcher, kernel: Any, grid: tuple[int, int, int], *args: Any, shape: Shape = ONE, **constants: Any
) -> None:
    """Launch a kernel with arguments in its order, and constants by name."""
    run(Launch(kernel, grid, dict(zip(kernel.arg_names, args, strict=False)), constants, shape))


def ordered(launch: Launch) -> list[tuple[str, Any]]:
    """Return the arguments in the kernel's order."""
    return [(name, launch.args[name]) for name in launch.kernel.arg_names if name in launch.args]


def signature(launch: Launch) -> list[str | None]:
    """Name the types of arguments as the compiler does, `:16` where they are aligned; None where there is none."""
    loose = launch.kernel.do_not_specialize
    made: list[str | None] = []
    for name, value in ordered(launch):
        if value is None:
            made.append(None)
        elif isinstance(value, torch.Tensor):
            made.append(
                f"*{TYPES[value.dtype]}" if value.data_ptr() % ALIGNED else f"*{TYPES[value.dtype]}:16"
            )
        elif isinstance(value, float):
            made.append("fp32")
        else:
            kind = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
            made.append(kind if value % ALIGNED or name in loose else f"{kind}:16")
    return made


def specialized(launch: Launch) -> tuple[Any, ...]:
    """Return everything that the compiled kernel of a launch depends on."""
    return launch.kernel, *signature(launch), *launch.constants.items(), launch.shape


def described(launch: Launch) -> str:
    """Return the same as a line, which is equal wherever the sources are."""
    kernel, shape = launch.kernel, launch.shape
    constants = ", ".join(f"{name}={value}" for name, value in sorted(launch.constants.items()))
    types = ", ".join(kind or "none" for kind in signature(launch))
    where = kernel.fn.__module__.rpartition(".")[2]
    return f"{where}.{kernel.fn.__name__}({types}) [{constants}] warps {shape.warps} stages {shape.stages}"
