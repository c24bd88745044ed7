"""Backends to test on: the reference, and the native one where it is built. torch keeps to one thread."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch

from quire.devices.protocol import Backend
from quire.devices.reference.backend import ReferenceBackend


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=["reference", "native"], scope="session")
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "reference":
        return ReferenceBackend()
    if not all(importlib.util.find_spec(name) for name in ("quire._native", "quire.devices.cpu.backend")):
        pytest.skip("the native extension is not built")
    return importlib.import_module("quire.devices.cpu.backend").NativeBackend()


@pytest.fixture
def wide_backend(backend: Backend) -> Backend:
    """`backend`, with float32 activations beside bfloat16 weights even where the CPU has a bfloat16 unit."""
    if isinstance(backend, ReferenceBackend):
        return backend
    isas = importlib.import_module("quire._native").available_isas()
    isa = next(name for name in isas if "bf16" not in name)
    return importlib.import_module("quire.devices.cpu.backend").NativeBackend(isa=isa)
