"""Kernels and wheels that a visit takes along, made where a compiler and an index are."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from bench.visit.catalog import CASES, compile_case
from bench.visit.place import Place
from bench.visit.shapes import FORMS, LLAMA_8B, options_of, write_model
from quire.build import EVERYTHING
from quire.config import EngineConfig
from quire.devices.artifacts import Artifacts, Builder
from quire.devices.cuda.cubins import Driver, Kernel, about_of, cubin
from quire.devices.cuda.target import target_named
from quire.engine.plan import plan_files

PLATFORMS = "manylinux_2_28", "manylinux_2_17", "manylinux2014", "manylinux1", "manylinux_2_5"
LIBRARIES = (
    "humming-kernels",
    "tabulate",
    "nvmath-python",
)  # which may be admitted; alone, since torch is there


def pack(folder: Path, target: str, names: list[str], python: str) -> None:
    """Compile what an 8B model launches in each of its forms, and fetch wheels and what they need with pip."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "wheels").mkdir(parents=True)
    made = Artifacts(folder / "artifacts", about_of(target_named(target)), "")
    for form in FORMS.values():
        compile_form(made, target, {k: v for k, v in form.items() if k != "batch_invariant"}, LLAMA_8B)
    made.save()
    platforms = [f"--platform={name}_x86_64" for name in PLATFORMS]
    command = [
        sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", "--implementation=cp",
        f"--python-version={python}", *platforms, "-d", str(folder / "wheels"),
    ]  # fmt: skip
    for more in (names, ["--no-deps", *LIBRARIES]):
        if subprocess.run([*command, *more], check=False).returncode:
            print(
                "no wheels were fetched; where pip reaches an index, run:\n  " + " ".join([*command, *more])
            )
    wheels = sorted(path.name for path in (folder / "wheels").iterdir())
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(
        f"{folder}: {size / 2**20:.1f} MiB, {len(made.files)} cubins, {len(wheels)} wheels: {', '.join(wheels)}"
    )


def compile_form(made: Artifacts, target: str, form: dict[str, Any], shape: dict[str, Any]) -> None:
    """Add the kernels of a model with dummy weights to artifacts."""
    with tempfile.TemporaryDirectory() as model:
        config = EngineConfig.from_options(
            model=write_model(Path(model), shape), **options_of("cuda", shape, **form)
        )
        config = replace(config, device=replace(config.device, device=target))
        plan = plan_files(config, None, EVERYTHING)
        backend: Any = plan.backend
        assert isinstance(backend, Builder)
        for key, (code, about) in backend.compiled(plan.memory.block_size, cubin, made.files):
            made.add(key, code, msgspec.to_builtins(about))


def cubins(place: Place, folder: Path) -> None:
    """Load by the driver alone what another compiler made elsewhere."""
    if not (folder / "artifacts").is_dir():
        place.row("no packed cubins: bench/gpu.py --pack makes them")
        return
    made, refused = Artifacts.opened(folder / "artifacts", "pack again"), list[str]()
    if not place.small:
        torch.zeros(1, device="cuda")  # makes the context that modules are loaded into
    for key in made.files:
        code, about = made.read(key), made.about(Kernel, key)
        try:
            if not place.small:
                Driver().load(code, about.name, about.shared_bytes)
            elif not code.startswith(b"\x7fELF") or about.name.encode() not in code:
                refused.append(f"{key}: not a cubin")
        except RuntimeError as error:
            refused.append(f"{key}: {error}")
    place.row(f"{len(made.files)} packed cubins", not refused, refused=refused[:4])


def table(place: Place, target: str) -> None:
    """Report what each kernel takes on a target, as `quire kernels` prints it."""
    for case in CASES:
        for kernel in compile_case(case, target):
            place.row(
                f"{case}: {kernel.kernel}", kernel.shared_bytes <= target_named(target).shared_bytes,
                registers=kernel.registers, spilled=kernel.spilled, shared_kib=kernel.shared_bytes // 1024,
                instruction=kernel.instruction, programs=kernel.programs, narrow=kernel.narrow,
            )  # fmt: skip
