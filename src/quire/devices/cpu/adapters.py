"""Packs adapters for a native plan (csrc/plan/adapters.h). Knows changes and recorded places; knows no step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.devices.adapters import Adapter, Change
from quire.devices.cpu.pack import format_of, pack, packed_of
from quire.devices.cpu.record import Recording
from quire.errors import EngineError
from quire.weights.schemes import WeightType
from quire.weights.tensor import FloatArray


@dataclass(frozen=True, slots=True)
class AdapterPacker:
    """Packs the low-rank weights of adapters as the plan's kernels read them."""

    isa: str
    pool: Any

    def changes(self, adapter: Adapter, recording: Recording) -> list[tuple[Any, ...]]:
        """Return what Plan.set_adapter takes. EngineError for a weight that the plan does not multiply with."""
        found: list[tuple[Any, ...]] = []
        for path, change in adapter.changes.items():
            if path in recording.embeddings:
                packed, places = self._embedding(change), recording.embeddings
            else:
                packed, places = self._product(change, adapter.dtype), recording.products
            found += [(*place, *packed, None) for place in _places(places, path)]
        for path, norm in adapter.norms.items():
            nothing: tuple[Any, ...] = (None, None, [], None, None, None, None)
            found += [(*place, *nothing, norm) for place in _places(recording.norms, path)]
        return found

    def _product(self, change: Change, dtype: WeightType) -> tuple[Any, ...]:
        down = None if change.down is None else self._pack(change.down, dtype)
        ups = [(self._pack(up.weight, dtype), up.first, up.start) for up in change.ups]
        return (down, None, ups, *_rest(change))

    def _embedding(self, change: Change) -> tuple[Any, ...]:
        lookup = None if change.down is None else np.ascontiguousarray(change.down.T, np.float32)
        ups = [(self._pack(up.weight, "float32"), up.first, up.start) for up in change.ups]
        return (None, lookup, ups, *_rest(change))

    def _pack(self, values: FloatArray, dtype: WeightType) -> Any:
        form = format_of(dtype, compact=False, screened=False)
        return pack([np.ascontiguousarray(values, np.float32)], form, False, self.isa, self.pool).packed


def _rest(change: Change) -> tuple[Any, ...]:
    weight = None if change.weight is None else packed_of(change.weight)
    return change.gain, change.shift, weight, change.bias


def _places(places: dict[str, list[tuple[int, int]]], path: str) -> list[tuple[int, int]]:
    if path not in places:
        raise EngineError(f"the adapter changes {path}, which the model does not compute with in that way")
    return places[path]
