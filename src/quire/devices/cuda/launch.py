"""Launches of kernels: what a launch is, and what runs or compiles it.

Every function that launches takes a Launcher first, so that one backend works on a device, in the interpreter, and for
cubins that are compiled ahead of time.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from typing import Any, Protocol

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from quire.devices.cuda.interpreter import interpret
from quire.devices.cuda.target import INTERPRETER, Target
from quire.devices.cuda.tiles import Shape

ONE = Shape()


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


@dataclass(frozen=True, slots=True)
class InterpretedLauncher:
    """Runs kernels on CPU tensors."""

    target: Target = INTERPRETER

    def __call__(self, launch: Launch) -> None:
        interpret(launch.kernel, launch.grid, launch.args, launch.constants)


@dataclass(frozen=True, slots=True)
class JitLauncher:
    """Compiles kernels when they are first launched, for the tensors' device and torch's current stream."""

    target: Target

    def __post_init__(self) -> None:
        find_cache()

    def __call__(self, launch: Launch) -> None:
        if 0 in launch.grid:
            return
        launch.kernel[launch.grid](**launch.args, **launch.constants, **options(launch))


@dataclass(frozen=True, slots=True)
class CompilingLauncher:
    """Compiles what is launched, for a target that need not be there. Its tensors may be torch's meta tensors."""

    target: Target
    compiled: list[CompiledKernel] = field(default_factory=list)

    def __post_init__(self) -> None:
        find_cache()

    def __call__(self, launch: Launch) -> None:
        self.compiled.append(compile_launch(launch, self.target))


def find_cache() -> None:
    """Let Triton keep compiled kernels for this process alone where its own directory cannot be written."""
    place = triton.knobs.cache.dir
    try:
        os.makedirs(place, exist_ok=True)
        writable = os.access(place, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        triton.knobs.cache.dir = tempfile.mkdtemp(prefix="quire-kernels-")


def launch(
    run: Launcher, kernel: Any, grid: tuple[int, int, int], *args: Any, shape: Shape = ONE, **constants: Any
) -> None:
    """Launch a kernel with arguments in its order, and constants by name."""
    run(Launch(kernel, grid, dict(zip(kernel.arg_names, args, strict=False)), constants, shape))


def options(launch: Launch) -> dict[str, Any]:
    """Options of a launch for the compiler. Multiplications and additions stay apart: each rounds by itself."""
    shape = launch.shape
    return {"num_warps": shape.warps, "num_stages": shape.stages, "enable_fp_fusion": False}


def compile_launch(launch: Launch, target: Target) -> CompiledKernel:
    """Compile a launch. Pointers, and integers divisible by 16, are promised to stay so, as Triton's JIT does."""
    names = launch.kernel.arg_names
    signature, constants, attributes = {}, {}, {}
    unspecialized = {names[i] if isinstance(i, int) else i for i in launch.kernel.do_not_specialize or ()}
    for index, name in enumerate(names):
        value = launch.constants.get(name, launch.args.get(name))
        if name in launch.constants or value is None:
            signature[name], constants[(index,)] = "constexpr", value
            continue
        signature[name] = triton.runtime.jit.mangle_type(value)
        aligned = hasattr(value, "data_ptr") or (isinstance(value, int) and value % 16 == 0)
        if aligned and name not in unspecialized:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", target.capability, 32), options=options(launch))
