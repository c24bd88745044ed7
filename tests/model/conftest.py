"""Backends to test on. torch uses one thread."""

from __future__ import annotations

import pytest
import torch

from quire import _native
from quire.devices.cpu.backend import NativeBackend
from quire.devices.protocol import Backend
from quire.devices.registry import make_backend


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=["reference", "native", "torch"], scope="session")
def backend(request: pytest.FixtureRequest) -> Backend:
    return make_backend(request.param, threads=1 if request.param == "torch" else None)


@pytest.fixture
def wide_backend(backend: Backend) -> Backend:
    """`backend`, with float32 activations beside bfloat16 weights even if the CPU has a bfloat16 unit."""
    if not isinstance(backend, NativeBackend):
        return backend
    return NativeBackend(isa=next(isa for isa in _native.available_isas() if "bf16" not in isa))
