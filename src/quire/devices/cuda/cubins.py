"""Launches compiled kernels by the driver, without a compiler: those of an engine directory, then those of a cache."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import logging
import os
import shutil
import struct
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch

from quire.devices.artifacts import MANIFEST, Artifacts
from quire.devices.cuda.launch import Launch, Launcher, described, ordered, signature, specialized
from quire.devices.cuda.target import KIB, WARP, Target
from quire.errors import ConfigError, EngineError, ModelError
from quire.lazy import Lazy, missing

if TYPE_CHECKING:
    from quire.devices.cuda import jit
else:
    jit = Lazy("quire.devices.cuda.jit")
cuda = Lazy("cuda.bindings.driver")

log = logging.getLogger("quire.devices")
KERNELS = Path(__file__).with_name("kernels")
MOST_CACHED, MOST_CACHES = 256 << 20, 8  # bytes of a cache, and caches: of targets and versions
FREE_SHARED = 48 * KIB  # bytes of shared memory that a kernel need not ask for
FORMS = {"i32": "i4x", "i64": "q", "fp32": "f4x"}
"""FORMS are 8 bytes each, of which a kernel reads the first ones; pointers are `Q`."""


class Kernel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a launch needs beside a cubin; `arguments` are types in order, as the compiler names them."""

    name: str
    arguments: list[str]
    shared_bytes: int
    warps: int


class Driver:
    """The calls of CUDA's driver that load and launch."""

    def version(self) -> int:
        """The release of CUDA that the driver is made for, times 1000."""
        return int(_checked(cuda.cuDriverGetVersion()))

    def load(self, code: bytes, name: str, shared_bytes: int) -> Any:
        """Load a function of a cubin, and let it take shared memory."""
        function = _checked(cuda.cuModuleGetFunction(_checked(cuda.cuModuleLoadData(code)), name.encode()))
        if shared_bytes > FREE_SHARED:
            most = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(cuda.cuFuncSetAttribute(function, most, shared_bytes))
        return function

    def launch(self, function: Any, grid: tuple[int, ...], threads: int, shared: int, places: int) -> None:
        """Launch it on torch's current stream; `places` is the address of addresses of its arguments."""
        stream = torch.cuda.current_stream().cuda_stream
        _checked(cuda.cuLaunchKernel(function, *grid, threads, 1, 1, shared, stream, places, 0))


def _checked(result: tuple[Any, ...]) -> Any:
    if int(result[0]):
        raise RuntimeError(f"CUDA driver error {result[0]!s}")
    return result[1] if len(result) > 1 else None


class Loaded:
    """A kernel that the driver loaded. Launches come from one thread: arguments are packed in one place."""

    def __init__(self, driver: Driver, code: bytes, kernel: Kernel) -> None:
        self._driver, self._kernel = driver, kernel
        self._function = driver.load(code, kernel.name, kernel.shared_bytes)
        forms = ["Q" if kind.startswith("*") else FORMS[kind.partition(":")[0]] for kind in kernel.arguments]
        # The last two are scratch memory, of which there is none.
        self._form = struct.Struct("<" + "".join(forms) + "QQ")
        self._packed = ctypes.create_string_buffer(self._form.size)
        begin = ctypes.addressof(self._packed)
        self._places = (ctypes.c_void_p * (len(forms) + 2))(*range(begin, begin + self._form.size, 8))

    def __call__(self, launch: Launch) -> None:
        there = (value for _, value in ordered(launch) if value is not None)
        given = (value.data_ptr() if isinstance(value, torch.Tensor) else value for value in there)
        self._form.pack_into(self._packed, 0, *given, 0, 0)
        kernel = self._kernel
        self._driver.launch(
            self._function, launch.grid, kernel.warps * WARP, kernel.shared_bytes, ctypes.addressof(self._places)
        )  # fmt: skip


class CubinLauncher:
    """Launches kernels of an engine directory, if there is one, then of a cache, which keeps what is compiled here.

    Without a cache nothing is compiled: a kernel that is missing is refused.
    """

    def __init__(
        self, target: Target, driver: Driver, built: Artifacts | None, cached: Artifacts | None
    ) -> None:
        self.target = target
        self.built, self.cached = built, cached
        self._driver = driver
        self._loaded: dict[tuple[Any, ...], Loaded] = {}

    def __call__(self, launch: Launch) -> None:
        if 0 in launch.grid:
            return
        key = specialized(launch)
        loaded = self._loaded.get(key)
        if loaded is None:
            loaded = self._loaded[key] = self._load(launch)
        loaded(launch)

    def _load(self, launch: Launch) -> Loaded:
        key = described(launch)
        code, about = self._found(key) or self._compiled(key, launch)
        try:
            return Loaded(self._driver, code, about)
        except RuntimeError as error:
            raise ConfigError(
                f"the driver refuses {key} ({error}): update it, or {again(self.target)}"
            ) from error

    def _found(self, key: str) -> tuple[bytes, Kernel] | None:
        if self.built is not None and key in self.built.files:
            return self.built.read(key), self.built.about(Kernel, key)
        if self.cached is None or key not in self.cached.files:
            return None
        try:
            return self.cached.read(key), self.cached.about(Kernel, key)
        except ModelError as error:
            log.warning("%s: compiling it again", error)
            return None

    def _compiled(self, key: str, launch: Launch) -> tuple[bytes, Kernel]:
        if self.cached is None:
            raise ConfigError(
                f"the engine directory lacks the kernel {key}: {again(self.target)} with the options of this start, or "
                "install the version of triton that built it"
            )
        with jit.without_lines():
            code, about = cubin(launch, self.target)
        self.keep(key, code, msgspec.to_builtins(about))
        return code, about

    def keep(self, key: str, code: bytes, about: dict[str, Any]) -> None:
        """Keep what was compiled for the next start, if there is room."""
        if self.cached is None or self.cached.nbytes > MOST_CACHED:
            return
        try:
            self.cached.add(key, code, about)
            self.cached.save()
        except OSError as error:
            log.info("compiled kernels are not kept: %s", error)


def again(target: Target) -> str:
    """The command that builds for a target."""
    return f"run `quire build MODEL --device cuda --target {target.name} -o DIR`"


def cubin(launch: Launch, target: Target) -> tuple[bytes, Kernel]:
    """Compile a launch. EngineError: it needs scratch memory, which launches here do not give."""
    made = jit.compile_launch(launch, target)
    if made.metadata.global_scratch_size or made.metadata.profile_scratch_size:
        raise EngineError(f"{made.metadata.name} needs scratch memory, which no launch gives it")
    kinds = [kind for kind in signature(launch) if kind is not None]
    return made.asm["cubin"], Kernel(made.metadata.name, kinds, made.metadata.shared, launch.shape.warps)


def about_of(target: Target) -> dict[str, Any]:
    """Everything that kernels compiled here for a target depend on, beside their launches."""
    found = {"triton": importlib.metadata.version("triton"), "toolkit": jit.toolkit(target)}
    return {"target": target.name, "sources": sources(), **found}


@cache
def sources() -> str:
    """A hash of the sources of all kernels."""
    found = hashlib.sha256()
    for path in sorted(KERNELS.glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def gpu_launcher(target: Target, folder: Path | None, driver: Driver | None = None) -> Launcher:
    """Launch what was built into a folder, and compile the rest if Triton is here.

    ConfigError: it was built for another target, for a newer driver or from other sources; ModelError: it is damaged.
    """
    has_triton, driver = not missing("triton"), driver or Driver()
    if isinstance(driver, Driver) and (missing("cuda") or missing("cuda.bindings")):
        if has_triton:
            return jit.JitLauncher(target)
        raise ConfigError("compiled kernels are launched by cuda-bindings: pip install 'quire-llm[cuda]'")
    if folder is None:
        return CubinLauncher(target, driver, None, open_cache(target))
    built = Artifacts.opened(folder, again(target))
    about = built.about(Built)
    if about.target != target.name:
        raise ConfigError(
            f"{folder.parent} was built for {about.target}, and the GPU is {target.name}: {again(target)}"
        )
    if int(about.toolkit.partition(".")[0]) > driver.version() // 1000:
        has = f"{driver.version() // 1000}.{driver.version() % 1000 // 10}"
        raise ConfigError(
            f"{folder.parent} has kernels for CUDA {about.toolkit}, and the driver is for {has}: update the driver"
        )
    if about.sources != sources():
        if not has_triton:
            raise ConfigError(f"{folder.parent} was built by another version of Quire: {again(target)}")
        log.warning("%s has kernels of another version of Quire: they are compiled here", folder.parent)
        return CubinLauncher(target, driver, None, open_cache(target))
    # Kernels of two compilers may differ in bits.
    same = has_triton and importlib.metadata.version("triton") == about.triton
    return CubinLauncher(target, driver, built, open_cache(target) if same else None)


class Built(msgspec.Struct, frozen=True):
    """The fields of `about_of`."""

    target: str
    sources: str
    triton: str
    toolkit: Annotated[str, msgspec.Meta(pattern=r"^[0-9]+\.[0-9]+$")]


def open_cache(target: Target) -> Artifacts:
    """Open the kernels that were compiled here before; a cache that is missing or damaged is begun anew."""
    about, given = about_of(target), os.environ.get("XDG_CACHE_HOME", "")
    every = Path(given if os.path.isabs(given) else os.path.expanduser("~/.cache"), "quire", "kernels")
    folder = every / hashlib.sha256(msgspec.json.encode(about)).hexdigest()[:24]
    with suppress(OSError):  # another process removes them too
        others = sorted(every.glob("*/" + MANIFEST), key=lambda path: path.stat().st_mtime)
        for old in [path.parent for path in others if path.parent != folder][: -(MOST_CACHES - 1)]:
            shutil.rmtree(old)
    try:
        return Artifacts.opened(folder, "")
    except ModelError:
        return Artifacts(folder, about, "")
