"""Memory given back: what the engine drops is gone before the backend is asked to give it to other processes."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from quire.devices.torch.memory import device_memory
from quire.engine.memory_release import MemoryRelease


class Thing:
    """A model, a cache or an executable."""


class Runner:
    def __init__(self, *held: Thing) -> None:
        self.held = held

    @property
    def loaded(self) -> bool:
        return bool(self.held)

    def unload(self) -> None:
        self.held = ()

    def load(self, *held: Any) -> None:
        self.held = held


@pytest.mark.parametrize("parts", [["kv_cache"], ["weights", "kv_cache"]])
def test_what_is_dropped_is_gone_before_memory_is_given_back(parts: list[str]) -> None:
    told: list[bool] = []
    model, cache = Thing(), Thing()
    runner = Runner(Thing(), cache)
    seen = [weakref.ref(cache), *([weakref.ref(model)] if "weights" in parts else [])]

    def free_memory() -> int:
        told.append(all(ref() is None for ref in seen))
        return 0

    memory: Any = MemoryRelease(runner, model, Thing, Thing, lambda *_: Thing(), free_memory)
    del model, cache
    memory.release(parts)
    assert told == [True]
    memory.restore(parts)
    assert runner.loaded


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_a_device_gives_back_what_torch_keeps_before_it_is_asked_what_is_free(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    class Module:
        def empty_cache(self) -> None:
            calls.append("empty_cache")

        def mem_get_info(self, device: Any) -> tuple[int, int]:
            calls.append("free")
            return 5, 8

        def recommended_max_memory(self) -> int:
            calls.append("free")
            return 8

        def driver_allocated_memory(self) -> int:
            return 3

    monkeypatch.setattr(torch, kind, Module())
    assert device_memory(torch.device(kind)) == 5
    assert calls == ["empty_cache", "free"]
    assert device_memory(torch.device("cpu")) > 0
