"""A driver of CUDA that keeps what it is asked for, and launches over tensors of the CPU for it."""

from __future__ import annotations

from typing import Any

import torch

from quire.devices.cuda.kernels import elementwise, norm, products, rows, sample


class FakeDriver:
    """Loads every cubin, or refuses it."""

    def __init__(self, release: int = 13_040, refuses: bool = False) -> None:
        self.release, self.refuses = release, refuses
        self.loaded: list[tuple[bytes, str, int]] = []
        self.launched: list[tuple[Any, ...]] = []

    def version(self) -> int:
        return self.release

    def load(self, code: bytes, name: str, shared_bytes: int) -> Any:
        if self.refuses:
            raise RuntimeError("CUDA driver error CUDA_ERROR_NO_BINARY_FOR_GPU")
        self.loaded.append((code, name, shared_bytes))
        return name

    def launch(self, function: Any, grid: Any, threads: int, shared_bytes: int, places: int) -> None:
        self.launched.append((function, grid, threads, shared_bytes, places))


def product(tokens: int, run: Any, columns: int = 128) -> None:
    x, out = (torch.zeros(tokens, columns, dtype=torch.bfloat16) for _ in range(2))
    products.linear(run, x, torch.zeros(columns, columns, dtype=torch.bfloat16), out)


def several(run: Any) -> None:
    """Launch kernels of several kinds."""
    x, ids = torch.zeros(3, 64, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int32)
    product(3, run)
    norm.normalize(run, x, x, norm.NormTensors("rms", torch.ones(64), None, 1e-5))
    rows.embed(run, torch.zeros(9, 64, dtype=torch.bfloat16), ids, x)
    elementwise.add(run, x, x, x)
    numbers, reals = torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, 4, dtype=torch.float64)
    sample.sample(run, torch.zeros(3, 320), None, numbers, reals, ids)
