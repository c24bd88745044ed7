"""Backends by name: each offers the same protocol, and a name that is not one is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.devices.host import HostLogits
from quire.devices.registry import BackendName, make_backend
from quire.devices.sampling import SlotSampling
from quire.devices.torch.run import TorchLogits
from quire.errors import ConfigError, EngineError
from quire.params import SamplingParams
from quire.weights.layouts import Int4, Int8
from quire.weights.schemes import Quantized

NAMES: list[BackendName] = ["auto", "native", "reference", "torch"]


@pytest.mark.parametrize("name", NAMES)
def test_a_backend_says_what_it_is(name: BackendName) -> None:
    backend = make_backend(name, threads=2)
    assert backend.name
    assert backend.threads >= 1
    assert backend.free_memory() > 0
    assert backend.arithmetic("float32") == "fp32"
    assert backend.arithmetic(Quantized(Int8())) == "int8"
    assert backend.arithmetic(Quantized(Int4(32), "float")) in ("fp32", "bf16")  # pairs where they are quick


@pytest.mark.parametrize("name", NAMES)
def test_an_outline_has_shapes(name: BackendName) -> None:
    outline = make_backend(name, threads=1).outline()
    assert outline.matrix([np.zeros((20, 8), np.float32)], "float32").shape == (20, 8)


@pytest.mark.parametrize("name", NAMES)
def test_a_sampler_refuses_the_logits_of_another_backend(name: BackendName) -> None:
    sampler = make_backend(name, threads=1).sampler(5)
    sampler.set(0, SlotSampling(0, SamplingParams(temperature=0)))
    rows = np.eye(5, dtype=np.float32)[3:4]
    slot, position = [0], [0]
    other = HostLogits(rows) if name == "torch" else TorchLogits(torch.from_numpy(rows))
    own = TorchLogits(torch.from_numpy(rows)) if name == "torch" else HostLogits(rows)
    with pytest.raises(EngineError, match=type(other).__name__):
        sampler.sample(other, slot, position)
    with pytest.raises(EngineError, match="ndarray"):
        sampler.sample(rows, slot, position)  # type: ignore[arg-type]
    assert sampler.sample(own, slot, position).tokens == [3]
    assert sampler.logprobs(own, np.array([3], np.int32), 1)[0].rank == 1


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="no backend 'abacus'"):
        make_backend("abacus")  # type: ignore[arg-type]
