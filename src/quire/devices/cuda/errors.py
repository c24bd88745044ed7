"""A GPU without memory raises torch's exception; callers expect Quire's, which says what to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quire.errors import ResourceError


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turn torch's error of missing memory into ResourceError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            "the GPU has no memory left: lower --gpu-memory-utilization, or end what else uses the GPU"
        ) from error
