"""The free memory of a device of torch, whose allocator keeps what was freed until it is told to give it back."""

from __future__ import annotations

from typing import Any

import torch

from quire.devices.cpu.machine import free_memory


def device_memory(device: Any) -> int:
    """Give back what nothing uses any more, and return the bytes that are free."""
    if device.type not in ("cuda", "xpu", "mps"):
        return free_memory()
    module = getattr(torch, device.type)
    module.empty_cache()
    if device.type == "mps":
        return int(module.recommended_max_memory() - module.driver_allocated_memory())
    return int(module.mem_get_info(device)[0])
