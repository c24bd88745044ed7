"""Cubins, and wheels that are missing there, for a visit: made where a compiler and an index are."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from bench.visit.catalog import CASES, compile_case
from bench.visit.place import Place
from quire.devices.cuda.aot import RecordingLauncher
from quire.devices.cuda.cubins import cubin
from quire.devices.cuda.jit import without_lines
from quire.devices.cuda.target import target_named

PLATFORMS = "manylinux_2_28", "manylinux_2_17", "manylinux2014", "manylinux1", "manylinux_2_5"


def pack(folder: Path, target: str, names: list[str], python: str) -> None:
    """Write the cubins of every case with their functions' names, and fetch wheels and what they need with pip."""
    shutil.rmtree(folder, ignore_errors=True)
    for part in ("cubins", "wheels"):
        (folder / part).mkdir(parents=True)
    run, functions = RecordingLauncher(target_named(target)), {}
    for case in CASES.values():
        case(run)
    for number, launch in enumerate(run.launches.values()):
        with without_lines():
            code, kernel = cubin(launch, run.target)
        functions[f"{number}.cubin"] = kernel.name
        (folder / "cubins" / f"{number}.cubin").write_bytes(code)
    (folder / "cubins" / "functions.json").write_text(json.dumps(functions))
    platforms = [f"--platform={name}_x86_64" for name in PLATFORMS]
    command = [
        sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", "--implementation=cp",
        f"--python-version={python}", *platforms, "-d", str(folder / "wheels"), *names,
    ]  # fmt: skip
    if subprocess.run(command, check=False).returncode:
        print("no wheels were fetched; where pip reaches an index, run:\n  " + " ".join(command))
    wheels = sorted(path.name for path in (folder / "wheels").iterdir())
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(
        f"{folder}: {size / 2**20:.1f} MiB, {len(functions)} cubins, {len(wheels)} wheels: {', '.join(wheels)}"
    )


def cubins(place: Place, folder: Path) -> None:
    """Load by the driver alone what another compiler made elsewhere."""
    about = folder / "cubins" / "functions.json"
    if not about.is_file():
        place.row("no packed cubins: bench/gpu.py --pack makes them")
        return
    functions, refused = json.loads(about.read_text()), list[str]()
    if not place.small:
        torch.zeros(1, device="cuda")  # makes the context that modules are loaded into
    for name, function in functions.items():
        code = (about.parent / name).read_bytes()
        module, found = ctypes.c_void_p(), ctypes.c_void_p()
        if place.small:
            status = 0 if code.startswith(b"\x7fELF") and function.encode() in code else -1
        else:
            driver: Any = ctypes.CDLL("libcuda.so.1")
            status = driver.cuModuleLoadData(ctypes.byref(module), code)
            status = status or driver.cuModuleGetFunction(ctypes.byref(found), module, function.encode())
        if status:
            refused.append(f"{function}: error {status}")
    place.row(f"{len(functions)} packed cubins", not refused, refused=refused[:4])


def table(place: Place, target: str) -> None:
    """Report what each kernel takes on a target, as `quire kernels` prints it."""
    for case in CASES:
        for kernel in compile_case(case, target):
            place.row(
                f"{case}: {kernel.kernel}", kernel.shared_bytes <= target_named(target).shared_bytes,
                registers=kernel.registers, spilled=kernel.spilled, shared_kib=kernel.shared_bytes // 1024,
                instruction=kernel.instruction, programs=kernel.programs, narrow=kernel.narrow,
            )  # fmt: skip
