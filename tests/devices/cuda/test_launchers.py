"""Launches by the driver alone, beside Triton's own launcher: a library in the driver's place keeps what they pass."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

NOTHING = (
    "cuDeviceGetAttribute cuOccupancyMaxActiveClusters cuFuncSetAttribute cuDevicePrimaryCtxRetain cuCtxSetCurrent "
    "cuTensorMapEncodeTiled cuFuncGetAttribute cuGetErrorString cuDeviceGet cuCtxGetCurrent cuCtxSetLimit "
    "cuStreamIsCapturing cuModuleUnload cuModuleLoadData cuModuleGetFunction cuFuncSetCacheConfig cuDriverGetVersion "
    "cuCtxGetLimit cuCtxGetDevice cuTensorMapEncodeIm2col cuInit cuDeviceGetCount"
)
LIBRARY = """
#include <stdint.h>
#include <string.h>
static int count;
static uint64_t kept[64];
static unsigned shape[7];
int cuLaunchKernelEx(const void *config, void *function, void **params, void **extra) {
  memcpy(shape, config, sizeof shape);
  for (int i = 0; i < count; ++i) memcpy(&kept[i], params[i], 8);
  return 0;
}
void expect(int number) { count = number; }
uint64_t *arguments(void) { return kept; }
unsigned *launched(void) { return shape; }
int cuPointerGetAttribute(void *data, int attribute, uint64_t p) { *(uint64_t *)data = p; return 0; }
int cuPointerGetAttributes(unsigned n, int *attributes, void **data, uint64_t p) {
  for (unsigned i = 0; i < n; ++i) *(uint64_t *)data[i] = p;
  return 0;
}
""" + "\n".join(f"int {name}(void) {{ return 0; }}" for name in NOTHING.split())
SCRIPT = """
import ctypes, sys
from dataclasses import replace
folder = sys.argv[1]
library = ctypes.CDLL(folder + "/libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
library.arguments.restype = ctypes.POINTER(ctypes.c_uint64 * 64)
library.launched.restype = ctypes.POINTER(ctypes.c_uint * 7)
import torch
import triton
triton.knobs.nvidia.libcuda_path = folder
from triton.backends.nvidia import driver as nvidia
from bench.visit.catalog import CASES
from quire.devices.cuda.aot import RecordingLauncher
from quire.devices.cuda.cubins import Kernel, Loaded
from quire.devices.cuda.launch import ordered, signature
from quire.devices.cuda.target import TARGETS
from tests.devices.cuda.drivers import FakeDriver

theirs = nvidia.CudaUtils()
run = RecordingLauncher(TARGETS["sm_90"])
for case in CASES.values():
    case(run)
for launch in run.launches.values():
    args = {
        name: torch.empty(1, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
        for name, value in launch.args.items()
    }
    launch = replace(launch, args=args)
    kinds = [kind for kind in signature(launch) if kind is not None]
    values = [value for _, value in ordered(launch) if value is not None]
    types = [kind.partition(":")[0] for kind in kinds]
    library.expect(len(types) + 2)
    facts = theirs.build_signature_metadata(types)
    marks = [nvidia.PyKernelArg(nested_tuple=None, type=nvidia.ARG_KERNEL) for _ in types]
    about = launch.shape.warps, 1, 4096
    theirs.launch(*launch.grid, 0, 1, False, False, about, *[None] * 5, marks, facts, tuple(values))
    driver = FakeDriver()
    loaded = Loaded(driver, b"", Kernel("kernel", kinds, 4096, launch.shape.warps))
    loaded(launch)
    [(_, grid, threads, shared, places)] = driver.launched
    addresses = (ctypes.c_void_p * (len(types) + 2)).from_address(places)
    for kind, address, kept in zip([*types, "*", "*"], addresses, library.arguments().contents):
        size = 4 if kind in ("i32", "fp32") else 8
        assert ctypes.string_at(address, size) == int(kept).to_bytes(8, "little")[:size], (launch.kernel.fn, kind)
    assert [*grid, threads, 1, 1, shared] == [*library.launched().contents]
print(len(run.launches), *sorted({kind for launch in run.launches.values() for kind in signature(launch) if kind}))
"""


def test_arguments_are_those_that_triton_s_launcher_passes(tmp_path: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        pytest.skip("Triton's launcher is compiled from C")
    source, made = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text(LIBRARY)
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(made), str(source)]
    subprocess.run(command, check=True)
    script = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    result = subprocess.run(script, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    count, *kinds = result.stdout.split()
    assert int(count) > 60
    assert {"*bf16:16", "fp32", "i32", "i32:16"} <= {*kinds}
