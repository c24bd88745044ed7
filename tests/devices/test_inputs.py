"""Weights whose columns have an order of their own, or factors of inputs: products as if they had none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.devices.ops import Linear
from quire.devices.reference.backend import ReferenceBackend
from quire.errors import EngineError, ModelError
from quire.weights.layouts import AnyLayout, Blocks, Int4, Int8, stackable
from quire.weights.schemes import Activations, Quantized
from quire.weights.tensor import Inputs, QuantTensor
from tests.devices.native_cases import ISAS, apply_rows, native, normal, seen
from tests.devices.test_blocks import assert_near, random_blocks

COLUMNS = 192
LAYOUTS: list[AnyLayout] = [
    Int4(32, True, "float32", inputs=True),
    Int4(64, False, "float32", inputs=True),
    Int8(inputs=True),
    Blocks("nvfp4", inputs=True),
    Blocks("mxfp4", inputs=True),
    Blocks("int8_32", inputs=True),
    Blocks("e4m3", inputs=True),
]


def tensor_of(layout: AnyLayout, rows: int = 40, factors: bool = True) -> QuantTensor:
    rng = np.random.default_rng(0)
    plain = (
        random_blocks(layout.kind, rows, COLUMNS)
        if isinstance(layout, Blocks)
        else layout.quantize(normal(rng, rows, COLUMNS))
    )
    ones = np.ones(COLUMNS, np.float32)
    scales = np.abs(normal(rng, COLUMNS)) + np.float32(0.5) if factors else ones
    inputs = Inputs(rng.permutation(COLUMNS).astype(np.int32), scales.astype(np.float32))
    return QuantTensor(layout, plain.codes, plain.scales, plain.zeros, inputs)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.label)
def test_products_are_those_of_the_plain_weight(
    isa: str, activations: Activations, layout: AnyLayout
) -> None:
    if layout.floats and activations == "int8":
        return
    tensor, x = tensor_of(layout), normal(np.random.default_rng(1), 33, COLUMNS)
    dtype = Quantized(layout, activations)

    def product(backend: Any, rows: int, threads_of: Any = None) -> Any:
        weight = backend.matrix([tensor], dtype)
        return apply_rows(backend, x[:rows], lambda g, t: g(Linear(t, weight)), 40)

    got, wanted = product(native(isa), 33), product(ReferenceBackend(), 33)
    assert tensor.inputs is not None
    ordered = np.stack([tensor.inputs.seen(row) for row in x]).astype(np.float32)
    rounded = seen(isa, ordered, dtype)
    if rounded is ordered:
        assert_near(got, wanted)
    if activations == "float":
        assert_near(wanted, x @ tensor.dequantize().T, 1e-5)
        assert_near(got, rounded.astype(np.float64) @ layout.dequantize(tensor).astype(np.float64).T)
    for rows in (1, 2, 5, 14):
        assert product(native(isa, 1), rows).tobytes() == got[:rows].tobytes()
    assert native(isa).matrix([tensor], dtype).dequantize().tobytes() == tensor.dequantize().tobytes()
    gate, up = tensor.rows(np.arange(20)), tensor.rows(np.arange(20, 40))
    both = native(isa).gated_matrix(gate, up, dtype)
    assert both.dequantize().tobytes() == tensor.dequantize().tobytes()


def test_the_size_is_that_of_the_codes_and_the_inputs() -> None:
    tensor = tensor_of(LAYOUTS[0])
    dtype, plain = Quantized(LAYOUTS[0]), Quantized(Int4(32, True, "float32"))
    bare = QuantTensor(plain.layout, tensor.codes, tensor.scales)
    extra = native().matrix([tensor], dtype).nbytes - native().matrix([bare], plain).nbytes
    assert extra == 8 * COLUMNS
    assert native().outline().matrix([tensor], dtype).nbytes == native().matrix([tensor], dtype).nbytes


def test_exported_weights_come_back_and_bad_orders_do_not() -> None:
    tensor = tensor_of(LAYOUTS[0])
    for backend in (native(), ReferenceBackend()):
        matrix = backend.matrix([tensor], Quantized(LAYOUTS[0], "float"))
        about, data = backend.export(matrix)
        assert backend.restore(about, data).dequantize().tobytes() == matrix.dequantize().tobytes()
    about, data = native().export(native().matrix([tensor], Quantized(LAYOUTS[0])))
    for place, value in ((0, COLUMNS), (0, -1), (0, int(data[-8 * COLUMNS :].view(np.int32)[1]))):
        damaged = np.empty(len(data) + 64, np.uint8)
        damaged = damaged[-damaged.ctypes.data % 64 :][: len(data)]
        damaged[:] = data
        damaged[-8 * COLUMNS :].view(np.int32)[place] = value
        with pytest.raises(ModelError, match="names each of them once"):
            native().restore(about, damaged)
    twice = QuantTensor(
        tensor.layout,
        tensor.codes,
        tensor.scales,
        None,
        Inputs(np.zeros(COLUMNS, np.int32), np.ones(COLUMNS, np.float32)),
    )
    with pytest.raises(EngineError, match="names each of them once"):
        native().matrix([twice], Quantized(LAYOUTS[0]))


def test_only_weights_of_one_order_are_stacked() -> None:
    tensor = tensor_of(LAYOUTS[0])
    assert stackable([tensor, tensor_of(LAYOUTS[0], 16)]) == tensor.inputs.equals(
        tensor_of(LAYOUTS[0], 16).inputs
    )  # type: ignore[union-attr, arg-type]
    other = QuantTensor(
        tensor.layout,
        tensor.codes,
        tensor.scales,
        None,
        Inputs(np.arange(COLUMNS, dtype=np.int32), np.ones(COLUMNS, np.float32)),
    )
    assert stackable([tensor, tensor])
    assert not stackable([tensor, other])
    assert not stackable([tensor, QuantTensor(tensor.layout, tensor.codes, tensor.scales)])
