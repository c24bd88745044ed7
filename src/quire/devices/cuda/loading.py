"""Arrays of the host become tensors of a device through a few buffers: reading, copying and packing overlap.

Pages of a mapped file are read by threads, into memory that the GPU copies from by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import torch

from quire.weights.tensor import Array

BUFFER, BUFFERS = 64 << 20, 3  # bytes of a buffer at most, unless a row has more; buffers
T = TypeVar("T")


@dataclass(slots=True)
class Buffer:
    """Memory of the host. `copied`: the event behind the last copy from it; None: there was none."""

    data: Any = None
    copied: Any = None


class Ring:
    """Buffers of up to `size` bytes, in turn, for one array at a time. A GPU's are pinned, and copies have events.

    `make` makes the memory of a buffer, `mark` an event behind what was launched.
    """

    def __init__(self, device: Any, size: int = BUFFER, count: int = BUFFERS) -> None:
        self.device, self.size = device, size
        gpu: Any = torch.cuda
        is_gpu = device.type == "cuda"
        self.make: Callable[[int], Any] = partial(torch.empty, dtype=torch.uint8, pin_memory=is_gpu)
        self.mark: Callable[[], Any] = (
            (lambda: gpu.current_stream(device).record_event()) if is_gpu else (lambda: None)
        )
        self._buffers = [Buffer() for _ in range(count)]
        self._readers = ThreadPoolExecutor(count, "weights")
        self._busy = Lock()

    def give_back(self) -> None:
        """Free the buffers until the next array."""
        with self._busy:
            for buffer in self._buffers:
                buffer.data = buffer.copied = None

    def sent(self, values: Any) -> Any:
        """An array, or a tensor of the host, as a tensor of the device."""
        if isinstance(values, torch.Tensor):
            bits = values.view(torch.uint8) if values.itemsize == 1 else values
            return self.sent(bits.numpy()).view(values.dtype)
        out = torch.empty(values.shape, dtype=_dtype(values), device=self.device)
        self.send(values, out)
        return out

    def send(self, array: Array, out: Any) -> None:
        """Copy an array into a tensor of the device, of any type, when what was launched so far is done."""
        rows = max(1, self.size // max(1, array[:1].nbytes))
        with self._busy:
            reads = deque[tuple[slice, Buffer, Future[Any]]]()
            try:
                for turn, start in enumerate(range(0, len(array), rows)):
                    if len(reads) == len(self._buffers):
                        self._copy(out, *reads.popleft())
                    buffer, place = self._buffers[turn % len(self._buffers)], slice(start, start + rows)
                    reads.append((place, buffer, self._readers.submit(self._read, buffer, array[place])))
                while reads:
                    self._copy(out, *reads.popleft())
            finally:
                wait([read for *_, read in reads])

    def _read(self, buffer: Buffer, part: Array) -> Any:
        """Read a part of an array into a buffer, once that was copied. Returns it as a tensor."""
        if buffer.copied is not None:
            buffer.copied.synchronize()
        if buffer.data is None or len(buffer.data) < part.nbytes:
            buffer.data = self.make(part.nbytes)
        dtype = _dtype(part)
        read = buffer.data[: part.nbytes].view(dtype).reshape(part.shape)
        bits = np.dtype(np.int16) if dtype == torch.bfloat16 else part.dtype
        np.copyto(
            read.view(torch.int16).numpy() if dtype == torch.bfloat16 else read.numpy(), part.view(bits)
        )
        return read

    def _copy(self, out: Any, place: slice, buffer: Buffer, read: Future[Any]) -> None:
        part, to = read.result(), out[place]
        if part.dtype != to.dtype or not to.is_contiguous():
            part = part.to(self.device, non_blocking=True)  # the device casts, and spreads rows
        to.copy_(part, non_blocking=True)
        buffer.copied = self.mark()


def _dtype(array: Array) -> Any:
    """The torch type of an array."""
    is_bfloat16 = array.dtype == ml_dtypes.bfloat16
    return torch.bfloat16 if is_bfloat16 else torch.from_numpy(np.empty(0, array.dtype)).dtype


def ahead(work: Callable[[slice], T], rows: int, at_once: int, threads: int) -> Iterator[tuple[slice, T]]:
    """Do work for rows, as many `at_once`, on threads: in order, and not far ahead of who takes the results."""
    places, begun = deque(slice(a, min(a + at_once, rows)) for a in range(0, rows, at_once)), deque[Any]()
    with ThreadPoolExecutor(threads, "packing") as pool:
        while places or begun:
            while places and len(begun) <= threads:
                begun.append((places[0], pool.submit(work, places.popleft())))
            place, done = begun.popleft()
            yield place, done.result()
