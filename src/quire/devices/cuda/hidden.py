"""Hidden states on a device, for drafters: no value of them comes to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quire.devices.cuda.copies import sent
from quire.devices.protocol import FloatArray


@dataclass(frozen=True, slots=True)
class CudaRows:
    """Rows [n, D] of a tensor that nothing else writes."""

    tensor: Any

    def __len__(self) -> int:
        return int(self.tensor.shape[0])

    def __getitem__(self, rows: slice | Sequence[int]) -> CudaRows:
        if not isinstance(rows, slice):
            if [*rows] == [*range(len(self))]:
                return self
            rows = sent(np.array(rows, np.int64), self.tensor.device)
        return CudaRows(self.tensor[rows])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> FloatArray:
        rows: FloatArray = np.ascontiguousarray(self.tensor.float().cpu().numpy(), dtype)
        return rows.copy() if copy else rows  # the interpreter's rows are in this memory

    def join(self, parts: Sequence[CudaRows], axis: int) -> CudaRows:
        return CudaRows(torch.cat([part.tensor for part in parts], axis))

    def normalized(self, weight: FloatArray, eps: float) -> CudaRows:
        x = self.tensor.float()
        return CudaRows(x / torch.sqrt((x * x).mean(1, keepdim=True) + eps) * sent(weight, x.device))
