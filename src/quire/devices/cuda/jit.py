"""Launchers that need Triton: its interpreter, and its compiler, at a first launch or for a target that is not here."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import msgspec
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas_version
from triton.compiler import ASTSource, CompiledKernel

from quire.devices.cuda.interpreter import interpret
from quire.devices.cuda.launch import Launch, ordered, signature
from quire.devices.cuda.target import INTERPRETER, KIB, TARGETS, WARP, Target


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


def options(launch: Launch) -> dict[str, Any]:
    """Options of a launch for the compiler. Multiplications and additions stay apart: each rounds by itself."""
    shape = launch.shape
    return {"num_warps": shape.warps, "num_stages": shape.stages, "enable_fp_fusion": False}


@contextmanager
def without_lines() -> Iterator[None]:
    """Leave line numbers of sources out of what is compiled meanwhile: they are two thirds of a cubin."""
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True
        yield


class Source(ASTSource):  # type: ignore[misc]
    """A kernel's source, of which threads read one at a time: Python 3.11 counts the depth of all parsers together."""

    turns = Lock()

    def make_ir(self, *given: Any, **named: Any) -> Any:
        with self.turns:
            return super().make_ir(*given, **named)


def compile_launch(launch: Launch, target: Target) -> CompiledKernel:
    """Compile a launch. Pointers, and integers divisible by 16, are promised to stay so, as Triton's JIT does."""
    find_cache()
    names = launch.kernel.arg_names
    types, constants, attributes = {}, {}, {}
    given = {name: kind for (name, _), kind in zip(ordered(launch), signature(launch), strict=True)}
    for index, name in enumerate(names):
        kind = given.get(name)
        if kind is None:
            types[name], constants[(index,)] = "constexpr", launch.constants.get(name)
            continue
        types[name], _, aligned = kind.partition(":")
        if aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = Source(fn=launch.kernel, signature=types, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", target.capability, WARP), options=options(launch))


def toolkit(target: Target) -> str:
    """Return the release of CUDA whose assembler makes cubins for a target, such as 13.4."""
    found = re.search(r"release ([0-9]+\.[0-9]+)", get_ptxas_version(target.capability))
    return found[1] if found else "0.0"


UNITS = re.compile(r"(tcgen05\.mma|wgmma|mma\.sync)[^\s;]*?[.:](bf16|f16|tf32|s8|i8|e4m3|e5m2|f8f6f4)\b")
NARROW = re.compile(r"ld\.global\S*\.[bsu](8|16)\s")
REGISTERS, LEAST = 1 << 16, 8
"""REGISTERS of a multiprocessor; a thread has whole parts of LEAST of them."""


class Compiled(msgspec.Struct, frozen=True):
    """What a kernel takes. `spilled` counts the bytes of a thread's registers that lie in memory.

    `narrow` are the loads of one or two bytes in its loops, `programs` those that one multiprocessor runs at once,
    `instruction` the matrix unit's and the type of its operands.
    """

    kernel: str
    registers: int
    spilled: int
    shared_bytes: int
    cubin_bytes: int
    instruction: str
    narrow: int
    programs: int


def measured(made: CompiledKernel) -> Compiled:
    """Read what a compiled kernel takes off its code."""
    code, text, about = made.asm["cubin"], made.asm["ptx"], made.metadata
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = dict(pair.split(":") for pair in usage.split() if pair.count(":") == 1 and pair[-1].isdigit())
    unit, (registers, shared) = UNITS.search(text), (int(used["REG"]), int(about.shared))
    target = TARGETS[f"sm_{about.target.arch}"]
    by_registers = REGISTERS // (-(-registers // LEAST) * LEAST * WARP)
    by_memory = (target.shared_bytes + KIB) // (shared + KIB)
    programs = min(min(by_registers, target.warps) // about.num_warps, by_memory)
    sizes = registers, int(used["STACK"]), shared, len(code)
    instruction = " ".join(unit.groups()) if unit else ""
    return Compiled(about.name, *sizes, instruction, len(NARROW.findall(in_loops(text))), programs)


def in_loops(text: str) -> str:
    """Return the lines between a label of PTX and the last branch back to it, of all labels."""
    lines, labels, inside = text.splitlines(), dict[str, int](), set[int]()
    for number, line in enumerate(lines):
        words = line.split()
        if words and words[0].endswith(":"):
            labels[words[0][:-1]] = number
        elif "bra" in line and words[-1][:-1] in labels:
            inside |= {*range(labels[words[-1][:-1]], number)}
    return "\n".join(lines[number] for number in sorted(inside))
