"""A GPU that fails raises torch's exceptions; callers expect Quire's, which say what to change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quire.errors import DeviceLostError, DeviceMemoryError, QuireError

LOST = re.compile(r"CUDA (driver )?error|Triton Error \[CUDA\]|CUDNN|cuBLAS")


@contextmanager
def device_errors(exhausted: type[QuireError] = DeviceMemoryError) -> Iterator[None]:
    """Turn torch's error of missing memory into `exhausted`, and those of a GPU that fails into DeviceLostError."""
    try:
        yield
    except QuireError:
        raise
    except torch.OutOfMemoryError as error:
        raise exhausted(
            "the GPU has no memory left: lower --gpu-memory-utilization, or end what else uses the GPU; `quire plan` "
            "shows what a model takes"
        ) from error
    except RuntimeError as error:
        if LOST.search(str(error)) is None:
            raise
        raise DeviceLostError(f"the GPU failed, and only a new process can use it again: {error}") from error
