"""Weights on their way to a device: any array, any type, few buffers, and none refilled before it was copied."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

import torch

from quire.devices.cuda import pack
from quire.devices.cuda.loading import Ring, ahead
from quire.weights.layouts import Int8
from tests.devices.cuda.test_stored import LAYOUTS, assert_same, backend, drawn, packed

CPU = torch.device("cpu")


def as_tensor(array: Any) -> Any:
    """The oracle: element by element, through float64."""
    return torch.tensor(array.astype(np.float64).tolist(), dtype=torch.float64).reshape(array.shape)


VIEWS: dict[str, Any] = {
    "whole": lambda array: array,
    "transposed": lambda array: array.T,
    "rows": lambda array: array[1::3],
    "columns": lambda array: array[:, 2:5],
    "none": lambda array: array[:0],
    "one value": lambda array: np.broadcast_to(array[:1, :1], (5, 9)),
}


@pytest.mark.parametrize("size", [1, 64, 100, 1 << 20])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.uint8])
def test_any_array_arrives(dtype: Any, view: str, size: int) -> None:
    array = VIEWS[view]((drawn(31, 7) * 50).clip(0).astype(dtype))
    ring = Ring(CPU, size, 2)
    assert torch.equal(ring.sent(array).double(), as_tensor(array))
    for to in (torch.float32, torch.bfloat16):
        out = torch.full((len(array), 2, array.shape[1]), torch.nan, dtype=to)
        ring.send(array, out[:, 1])
        assert torch.equal(out[:, 1], as_tensor(array).to(to))
        assert out[:, 0].isnan().all()


class Copies:
    """Stands in for a GPU: copies are done when their event is waited for, and not before."""

    def __init__(self, ring: Ring) -> None:
        self.made, self.late, self.waits = list[int](), list[Any](), 0
        ring.make, ring.mark = self.make, self.mark
        self._copy, ring._copy = ring._copy, self.copy  # type: ignore[method-assign]

    def make(self, nbytes: int) -> Any:
        self.made.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, *given: Any) -> None:
        given[-1].result()
        self.late.append(given)
        given[2].copied = Event(self, given)

    def mark(self) -> None:
        return None


class Event:
    def __init__(self, copies: Copies, given: Any) -> None:
        self._copies, self._given = copies, given

    def synchronize(self) -> None:
        self._copies.waits += 1
        self._copies._copy(*self._given)
        self._copies.late.remove(self._given)


def test_a_buffer_is_not_refilled_before_it_was_copied() -> None:
    ring = Ring(CPU, 8 * 4 * 7, 3)
    copies, array = Copies(ring), drawn(100, 7)
    out = torch.full((100, 7), torch.nan)
    ring.send(array, out)
    assert len(copies.made) == 3
    assert max(copies.made) == 8 * 4 * 7
    assert copies.waits == 13 - 3
    for given in [*copies.late]:
        given[2].copied.synchronize()
    assert np.array_equal(out.numpy(), array)


def test_buffers_are_made_again_after_they_were_given_back() -> None:
    ring = Ring(CPU, 64, 2)
    made = list[int]()
    ring.make = lambda nbytes: (made.append(nbytes), torch.empty(nbytes, dtype=torch.uint8))[1]
    for _ in range(2):
        ring.send(drawn(20, 4), torch.empty(20, 4))
        assert len(made) == 2
    ring.give_back()
    ring.send(drawn(20, 4), torch.empty(20, 4))
    assert len(made) == 4


def test_a_failure_leaves_the_ring_as_it_was() -> None:
    ring = Ring(CPU, 64, 2)
    with pytest.raises(RuntimeError):
        ring.send(drawn(20, 4), torch.empty(20, 5))
    assert np.array_equal(ring.sent(drawn(20, 4)).numpy(), drawn(20, 4))


@pytest.mark.parametrize("name", LAYOUTS)
def test_some_rows_at_a_time_give_the_same_weight(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [packed(LAYOUTS[name], gated) for gated in (False, True)]
    monkeypatch.setattr(pack, "AT_ONCE", 4 * 256)
    for gated, matrix in zip((False, True), wanted, strict=True):
        assert_same(packed(LAYOUTS[name], gated), matrix)


def test_a_rounded_weight_is_that_of_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "AT_ONCE", 3 * 256)
    wanted = np.concatenate(
        [Int8().quantize(part).dequantize() for part in (drawn(6, 256), drawn(6, 256) * 2)]
    )
    assert np.array_equal(packed(Int8()).dequantize(), wanted)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_float_parts_are_stacked_and_rounded(dtype: Any) -> None:
    parts = [drawn(6, 9), drawn(6, 9).astype(ml_dtypes.bfloat16).T.copy().T]
    rows = [as_tensor(part).to(getattr(torch, dtype)) for part in parts]
    assert torch.equal(backend().matrix(parts, dtype).values, torch.cat(rows))
    gated = backend().gated_matrix(*parts, dtype)
    assert torch.equal(gated.values[::2], rows[0])
    assert torch.equal(gated.values[1::2], rows[1])


def test_work_ahead_is_in_order_and_bounded() -> None:
    begun = list[int]()

    def work(place: slice) -> int:
        begun.append(place.start)
        return place.stop

    found = list[int]()
    for place, done in ahead(work, 100, 7, 2):
        assert done == place.stop
        found.append(done)
        assert len(begun) <= len(found) + 3
    assert found == [*range(7, 99, 7), 100]
