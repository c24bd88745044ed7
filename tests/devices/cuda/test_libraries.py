"""Calls of libraries that no machine here can run, against stand-ins that compute what their documentation says."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

import torch

from quire.devices.cuda import libraries
from quire.devices.cuda.jit import InterpretedLauncher
from quire.devices.cuda.kernels.packed import Form, PackedWeight
from quire.devices.cuda.libraries import copied_by_humming, of_humming, pinned
from quire.devices.cuda.pack import CudaMatrix
from tests.devices.cuda.test_products import drawn, near, poison

RUN = InterpretedLauncher()
BF16 = torch.bfloat16
TYPES = {0: torch.float32, 2: torch.float16, 14: BF16}


def number(place: int, kind: Any) -> int:
    return int(np.ctypeslib.as_array(ctypes.cast(place, ctypes.POINTER(kind)), (1,))[0])


class CublasLt:
    """cuBLASLt's functions over memory of the host: matrices of columns, which lie `ld` elements apart."""

    MatmulDescAttribute = SimpleNamespace(TRANSA=3)
    MatmulPreferenceAttribute = SimpleNamespace(REDUCTION_SCHEME_MASK=3, MAX_WORKSPACE_BYTES=1)
    matmul_heuristic_result_dtype = np.dtype([("algo", [("data_", "<u8", (8,))]), ("workspace_size", "<u8")])

    def __init__(self, found: int = 1) -> None:
        self.layouts, self.asked, self.preferences, self.found = (
            list[Any](),
            list[Any](),
            dict[int, int](),
            found,
        )

    def create(self) -> int:
        return 1

    def matmul_desc_create(self, compute: int, scale: int) -> int:
        assert (compute, scale) == (68, 0)
        return 2

    def matmul_desc_set_attribute(self, product: int, name: int, place: int, size: int) -> None:
        assert (product, name, size, number(place, ctypes.c_int32)) == (2, 3, 4, 1)

    def matrix_layout_create(self, kind: int, rows: int, columns: int, ld: int) -> int:
        self.layouts.append((TYPES[kind], rows, columns, ld))
        return len(self.layouts) - 1

    def matmul_preference_create(self) -> int:
        return 3

    def matmul_preference_set_attribute(self, wanted: int, name: int, place: int, size: int) -> None:
        self.preferences[name] = number(place, {4: ctypes.c_uint32, 8: ctypes.c_uint64}[size])

    def matmul_algo_get_heuristic(
        self, handle: int, product: int, a: int, b: int, c: int, d: int, wanted: int, most: int, place: int, count: int
    ) -> None:  # fmt: skip
        self.asked.append((self.layouts[b], self.layouts[d]))
        np.ctypeslib.as_array(ctypes.cast(place, ctypes.POINTER(ctypes.c_uint64)), (8,))[:] = 77
        np.ctypeslib.as_array(ctypes.cast(count, ctypes.POINTER(ctypes.c_int32)), (1,))[:] = self.found

    def matrix(self, place: int, layout: int) -> Any:
        """Its numbers, as a tensor of rows and columns that shares their memory."""
        dtype, rows, columns, ld = self.layouts[layout]
        memory = (ctypes.c_char * (ld * columns * dtype.itemsize)).from_address(place)
        return torch.frombuffer(memory, dtype=dtype).view(columns, ld)[:, :rows].T

    def matmul(
        self, handle: int, product: int, alpha: int, a: int, of_a: int, b: int, of_b: int, beta: int, c: int, of_c: int,
        d: int, of_d: int, algorithm: int, workspace: int, size: int, stream: int,
    ) -> None:  # fmt: skip
        assert (number(algorithm, ctypes.c_uint64), workspace, size, stream) == (77, 0, 0, 9)
        factors = (
            np.ctypeslib.as_array(ctypes.cast(alpha, ctypes.POINTER(ctypes.c_float)), (1,)),
            beta - alpha,
        )
        assert (float(factors[0][0]), factors[1], c, of_c) == (1.0, 4, d, of_d)
        sums = self.matrix(a, of_a).T.double() @ self.matrix(b, of_b).double()
        self.matrix(d, of_d).copy_(sums)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_cublaslt_multiplies_by_one_algorithm(monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    lt, weight = CublasLt(), drawn(24, 40, dtype=dtype)
    monkeypatch.setattr(libraries, "lt", lt)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=9))
    form = pinned(RUN, CudaMatrix(weight), dtype)
    assert form is not None
    for kind in form.types:
        for rows in (1, 7, 64, 7):
            x, out = drawn(rows, 40, dtype=dtype), poison(rows, 24, dtype=kind)
            form.multiply(x, out)
            assert near(out, x.double() @ weight.double().T)
    assert lt.preferences == {3: 0, 1: 0}
    assert lt.asked == [((dtype, 40, 64, 40), (kind, 24, 64, 24)) for kind in form.types]
    assert pinned(RUN, CudaMatrix(weight.float()), dtype) is None
    monkeypatch.setattr(libraries, "lt", CublasLt(found=0))
    form = pinned(RUN, CudaMatrix(weight), dtype)
    assert form is not None
    with pytest.raises(RuntimeError, match="no algorithm"):
        form.multiply(drawn(1, 40, dtype=dtype), poison(1, 24, dtype=dtype))


class HummingLayer:
    """humming's layer: codes less half of their range, times the scales of their groups."""

    def __init__(self, shape_n: int, shape_k: int, weight_config: dict[str, Any], torch_dtype: Any) -> None:
        self.shape, self.about, self.act, self.ready = (shape_n, shape_k), weight_config, torch_dtype, False

    def to(self, device: Any) -> HummingLayer:
        return self

    def load_from_tensors(self, tensors: dict[str, Any]) -> None:
        bits, group = int(self.about["dtype"].removeprefix("uint")), self.about["group_size"] or self.shape[1]
        codes = tensors["weight"]
        assert codes.shape == self.shape
        assert 0 <= int(codes.min()) <= int(codes.max()) < 1 << bits
        assert tensors["weight_scale"].dtype == self.act
        scales = tensors["weight_scale"].double().repeat_interleave(group, 1)
        self.values = (codes.double() - (1 << (bits - 1))) * scales

    def transform(self) -> None:
        self.ready = True

    def __call__(self, x: Any, outputs: Any, compute_config: dict[str, Any]) -> Any:
        assert self.ready
        assert compute_config == {"use_batch_invariant": True, "gemm_type": "dense"}
        return outputs.copy_(x.double() @ self.values.T)


@pytest.mark.parametrize("bits", [4, 8])
def test_humming_gets_codes_and_scales_as_it_reads_them(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    def pack_weight(codes: Any, given: int) -> Any:
        assert (given, codes.dtype, codes.is_contiguous()) == (bits, torch.int32, True)
        return codes

    monkeypatch.setattr(libraries, "humming", SimpleNamespace(HummingLayer=HummingLayer))
    monkeypatch.setattr(libraries, "humming_ops", SimpleNamespace(pack_weight=pack_weight))
    made, group = torch.Generator().manual_seed(1), 64 if bits == 4 else 0
    codes = torch.randint(0, 16, (24, 192), generator=made).to(torch.uint8)
    if bits == 8:
        codes = torch.randint(-127, 128, (24, 192), generator=made).to(torch.int8)
    scales = torch.rand(24, 3 if group else 1, generator=made).to(BF16)
    packed = PackedWeight.pack(Form(codes.dtype, group), codes, scales)
    form = of_humming(RUN, CudaMatrix(None, packed=packed), BF16)
    assert form is not None
    x, out = drawn(5, 192, dtype=BF16), poison(5, 24, dtype=BF16)
    form.multiply(x, out)
    assert near(out, x.double() @ packed.values().double().T)
    assert form.types == (BF16,)
    assert copied_by_humming(CudaMatrix(None, packed=packed)) == packed.codes.nbytes + packed.scales.nbytes
    fine = PackedWeight.pack(Form(codes.dtype, group), codes, scales.float() * 1.0001)
    rounding, floats = CudaMatrix(None, packed=packed, rounds=True), CudaMatrix(drawn(24, 192, dtype=BF16))
    for other in (CudaMatrix(None, packed=fine), rounding, floats):
        assert of_humming(RUN, other, BF16) is None
    assert copied_by_humming(rounding) == copied_by_humming(floats) == 0
    assert of_humming(RUN, CudaMatrix(None, packed=packed), torch.float32) is None
