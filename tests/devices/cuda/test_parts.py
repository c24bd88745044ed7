"""Adapters, sampling and copies of blocks by themselves: right, and rows keep their bits, with a GPU's tiles too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

from quire import _native
from quire.devices.cpu.sampler import NativeSampler
from quire.devices.cuda.jit import InterpretedLauncher
from quire.devices.cuda.parts import check_adapters, check_copies, check_sampler
from quire.devices.cuda.sampler import CudaSampler
from quire.devices.cuda.selfcheck import Verdict
from quire.devices.cuda.target import INTERPRETER, TARGETS
from quire.devices.kv import KVDtype, KVSpec
from quire.devices.registry import make_backend

RIGHT = Verdict(True, True)
CPU = torch.device("cpu")


@pytest.mark.parametrize("target", [INTERPRETER, TARGETS["sm_90"]], ids=lambda target: target.name)
@pytest.mark.parametrize("act", [torch.bfloat16, torch.float32])
def test_adapters(target: Any, act: Any) -> None:
    assert check_adapters(InterpretedLauncher(target), act, CPU) == RIGHT


@pytest.mark.parametrize("vocab", [31, 320, 1030])
def test_sampling(vocab: int) -> None:
    pool = _native.ThreadPool(1)
    last = torch.zeros(64, dtype=torch.int32)
    own = CudaSampler(vocab, pool, InterpretedLauncher(), last)
    assert check_sampler(own, NativeSampler(vocab, pool), CPU) == RIGHT


@pytest.mark.parametrize("kept", ["bfloat16", "int8", "fp8_e4m3"])
def test_copies(kept: KVDtype) -> None:
    spec = KVSpec(2, 2, 16, kept)
    cache: Any = make_backend(threads=1, device="interpreter").kv_cache(spec, 4, 16)
    assert check_copies(cache) == RIGHT
