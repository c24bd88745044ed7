"""Products with weights of blocks: values of the gguf package, sums of the reference, the same bits on every path."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import pytest

from quire.devices.ops import Embed, GatedLinear, Linear
from quire.devices.protocol import Backend
from quire.devices.reference.backend import ReferenceBackend
from quire.devices.torch.backend import TorchBackend
from quire.errors import EngineError
from quire.weights.layouts import Blocks, Int8
from quire.weights.layouts.blocks import KINDS
from quire.weights.layouts.blocks.scaled import DECODERS
from quire.weights.schemes import Activations, Quantized
from quire.weights.tensor import QuantTensor, Sparse
from tests.devices.native_cases import ISAS, apply_rows, native, normal, seen

BOTH: tuple[Activations, ...] = ("int8", "float")
OWN = sorted(DECODERS)  # kinds that llama.cpp lacks
NAMES = sorted(KINDS.keys() - OWN)
# Where the float16 fields of a block are, if not at its start alone.
HALVES = {
    **dict.fromkeys(("q4_1", "q5_1", "q4_k", "q5_k"), (0, 2)),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q6_k": (208,),
    "tq1_0": (52,),
    "tq2_0": (64,),
    "iq1_m": (),
    "mxfp4": (),
}


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> QuantTensor:
    """Any bits but for the scales, which are of the size that weights have, and numbers that are not finite."""
    about, rng = KINDS[kind], np.random.default_rng(seed)
    if kind in OWN:
        return random_own(kind, rows, columns, rng)
    raw = rng.integers(0, 256, (rows, columns // about.columns, about.nbytes), np.uint8)
    if kind == "mxfp4":
        raw[..., 0] = rng.integers(118, 124, raw.shape[:2])
    if kind == "iq1_m":  # 0x2400, spread over the top half bytes of four fields
        for at, part in zip((49, 51, 53, 55), (0, 0, 4, 2), strict=True):
            raw[..., at] = raw[..., at] & 15 | part << 4
    for at in HALVES.get(kind, (0,)):
        scales = (normal(rng, *raw.shape[:2], 1) * 0.02).astype(np.float16)
        raw[..., at : at + 2] = scales.view(np.uint8)
    return Blocks(kind).tensor(raw.reshape(rows, -1))


def random_own(kind: str, rows: int, columns: int, rng: np.random.Generator) -> QuantTensor:
    about = KINDS[kind]
    raw = rng.integers(0, 256, (rows, columns // about.columns, about.nbytes), np.uint8)
    if kind.startswith("e5m2"):
        raw &= 0xBF  # from here on exponents are below 16
    elif kind.startswith(("e4m3", "mxfp8")):
        raw[(raw & 0x7F) == 0x7F] = 0x7E
    if kind == "mxfp8":
        raw[..., 0] = rng.integers(0, 124, raw.shape[:2])
    elif kind.startswith("nvfp4"):
        raw[..., :4] = rng.integers(0, 0x7F, (*raw.shape[:2], 4))
    elif not kind.startswith("lut") and not about.row:
        scales = (normal(rng, *raw.shape[:2], 1) * 0.02).astype(np.float32)
        raw[..., :4] = scales.view(np.uint8)
    if kind.startswith("affine"):
        raw[..., 4:8] = (np.abs(normal(rng, *raw.shape[:2], 1)) * 8).astype(np.float32).view(np.uint8)
    words = (normal(rng, rows, about.row // 4) * 0.02).astype(np.float32)
    return Blocks(kind).tensor(np.concatenate([words.view(np.uint8), raw.reshape(rows, -1)], axis=1))


def decoded(tensor: QuantTensor) -> Any:
    assert isinstance(tensor.layout, Blocks)
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(
            tensor.codes, gguf.GGMLQuantizationType[tensor.layout.kind.upper()]
        ).reshape(tensor.shape)


def product(backend: Backend, x: Any, tensors: list[QuantTensor], activations: Activations) -> Any:
    weight = backend.matrix(tensors, Quantized(tensors[0].layout, activations))  # type: ignore[arg-type]
    return apply_rows(backend, x, lambda g, t: g(Linear(t, weight)), weight.shape[0])


def assert_near(got: Any, wanted: Any, part: float = 3e-6) -> None:
    """Equal but for what rounding sums in another order changes, relative to the largest output of a row."""
    size = np.abs(wanted).max(axis=1, keepdims=True) + np.float32(1e-30)
    np.testing.assert_allclose(got / size, wanted / size, atol=part)


@pytest.mark.parametrize("kind", NAMES)
def test_packed_values_are_those_of_the_format(kind: str) -> None:
    tensor = random_blocks(kind, 37, 768)
    dtype, wanted = Quantized(Blocks(kind)), decoded(tensor)
    assert tensor.dequantize().tobytes() == wanted.tobytes()
    for backend in (native(), ReferenceBackend()):
        matrix = backend.matrix([tensor], dtype)
        assert matrix.dequantize().tobytes() == wanted.tobytes()
    gate, up = tensor.rows(np.arange(18)), tensor.rows(np.arange(18, 36))
    assert native().gated_matrix(gate, up, dtype).dequantize().tobytes() == wanted[:36].tobytes()


@pytest.mark.parametrize("kind", NAMES)
def test_a_weight_has_the_size_of_its_blocks(kind: str) -> None:
    tensor = random_blocks(kind, 64, 1024)
    matrix = native().matrix([tensor], Quantized(Blocks(kind)))
    assert matrix.nbytes == tensor.codes.nbytes
    planned = native().outline().matrix([Blocks(kind).outline(64, 1024)], Quantized(Blocks(kind)))
    assert planned.nbytes == matrix.nbytes


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", OWN)
def test_codes_of_floats_have_the_values_of_their_formula(isa: str, kind: str) -> None:
    tensor = random_blocks(kind, 37, 768)
    wanted = tensor.dequantize()
    assert np.isfinite(wanted).all()
    assert wanted.std() > 0
    for columns in (768, KINDS[kind].columns * 3):
        part = random_blocks(kind, 37, columns)
        dtype = Quantized(Blocks(kind), "float")
        assert native(isa).matrix([part], dtype).dequantize().tobytes() == part.dequantize().tobytes()
    gate, up = tensor.rows(np.arange(18)), tensor.rows(np.arange(18, 36))
    assert native(isa).gated_matrix(gate, up, dtype).dequantize().tobytes() == wanted[:36].tobytes()
    assert native().outline().matrix([tensor], dtype).nbytes == native().matrix([tensor], dtype).nbytes


def test_floats_are_not_multiplied_with_int8() -> None:
    with pytest.raises(EngineError, match="not multiplied with activations in int8"):
        native().matrix([random_blocks("e4m3", 16, 256)], Quantized(Blocks("e4m3"), "int8"))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("kind", "activations"),
    [
        *((kind, activations) for kind in NAMES for activations in BOTH),
        *(
            (kind, activations)
            for kind in OWN
            for activations in BOTH
            if activations == "float" or not KINDS[kind].floats
        ),
    ],
)
def test_products_are_the_reference_and_alone_as_in_any_batch(
    isa: str, kind: str, activations: Activations
) -> None:
    rng = np.random.default_rng(1)
    tensor, x = random_blocks(kind, 50, 512), normal(rng, 33, 512)
    x[0], x[1] = 0.0, -0.0
    x[2, ::3] *= np.float32(1e20)
    x = seen(isa, x, Quantized(Blocks(kind), activations))
    got = product(native(isa), x, [tensor], activations)
    wanted = product(ReferenceBackend(), x, [tensor], activations)
    assert_near(got, wanted)
    for rows in (1, 2, 3, 4, 5, 6, 7, 15):
        assert product(native(isa, 1), x[:rows], [tensor], activations).tobytes() == got[:rows].tobytes(), (
            rows
        )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", [*OWN, "mxfp4"])
def test_a_row_with_a_single_one_finds_the_values_of_its_column(isa: str, kind: str) -> None:
    tensor, x = random_blocks(kind, 80, 384), np.eye(384, dtype=np.float32)
    wanted = tensor.dequantize().T
    np.testing.assert_array_equal(product(native(isa), x, [tensor], "float"), wanted)
    for row in (0, 1, 2, 3, 127, 383):
        found = product(native(isa, 1), x[row : row + 1], [tensor], "float")
        np.testing.assert_array_equal(found, wanted[row : row + 1])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["lut3", "lut4", "nf4", "e4m3"])
def test_a_sparse_part_is_added_alone_as_in_any_batch(isa: str, kind: str) -> None:
    rng = np.random.default_rng(4)
    dense, x = random_blocks(kind, 50, 320), normal(rng, 21, 320)
    counts = rng.integers(0, 9, 50)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    columns = np.concatenate([np.sort(rng.choice(320, count, False)) for count in counts]).astype(np.int32)
    layout = Blocks(kind, entries=int(starts[-1]) // 50 + 1)
    tensor = replace(dense, layout=layout, sparse=Sparse(starts, columns, normal(rng, int(starts[-1]))))
    got = product(native(isa), x, [tensor], "float")
    assert_near(got, product(ReferenceBackend(), x, [tensor], "float"))
    for rows in (1, 2, 7, 15):
        assert product(native(isa, 1), x[:rows], [tensor], "float").tobytes() == got[:rows].tobytes(), rows


@pytest.mark.parametrize("columns", [32, 96, 320])
def test_small_blocks_need_no_multiple_of_256(columns: int) -> None:
    x = normal(np.random.default_rng(2), 9, columns)
    for kind in ("q8_0", "q5_1", "mxfp4"):
        tensor = random_blocks(kind, 21, columns)
        assert (
            native().matrix([tensor], Quantized(Blocks(kind))).dequantize().tobytes()
            == decoded(tensor).tobytes()
        )
        for activations in BOTH:
            rounded = seen(native().isa, x, Quantized(Blocks(kind), activations))
            got = product(native(), rounded, [tensor], activations)
            assert_near(got, product(ReferenceBackend(), rounded, [tensor], activations))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activations", BOTH)
def test_parts_of_different_kinds_make_one_weight(isa: str, activations: Activations) -> None:
    tensors = [random_blocks(kind, rows, 512) for kind, rows in (("q4_k", 48), ("q8_0", 16), ("q6_k", 21))]
    dtype, values = Quantized(Blocks("q4_k"), activations), np.concatenate([decoded(t) for t in tensors])
    assert native(isa).matrix(tensors, dtype).dequantize().tobytes() == values.tobytes()
    x = normal(np.random.default_rng(3), 20, 512)
    got, wanted = (product(b, x, tensors, activations) for b in (native(isa), ReferenceBackend()))
    assert_near(got, wanted)
    assert product(native(isa), x[:1], tensors, activations).tobytes() == got[:1].tobytes()
    gate, up = random_blocks("iq4_xs", 40, 512, 4), random_blocks("q5_k", 40, 512, 5)
    results = []
    for backend in (native(isa), ReferenceBackend()):
        weight = backend.gated_matrix(gate, up, Quantized(Blocks("iq4_xs"), activations))
        results.append(apply_rows(backend, x, lambda g, t, w=weight: g(GatedLinear(t, w, "silu")), 40))
    assert_near(*results, 1e-5)


def test_torch_rounds_activations_by_the_same_blocks() -> None:
    x = normal(np.random.default_rng(6), 4, 512)
    for kind in ("q8_0", "q6_k"):
        tensor = random_blocks(kind, 20, 512)
        wanted = product(ReferenceBackend(), x, [tensor], "int8")
        assert_near(product(TorchBackend(1), x, [tensor], "int8"), wanted)


@pytest.mark.parametrize("isa", ISAS)
def test_bad_scales_stay_in_their_rows(isa: str) -> None:
    """Any bytes are blocks: scales that are infinite or no number give such outputs, in their rows alone."""
    for kind in NAMES:
        tensor = random_blocks(kind, 20, 512)
        hostile = tensor.codes.copy()
        hostile[3] = 0xFF
        hostile[7] = np.random.default_rng(7).integers(0, 256, hostile.shape[1], np.uint8)
        got = product(native(isa), np.ones((2, 512), np.float32), [Blocks(kind).tensor(hostile)], "int8")
        clean = product(native(isa), np.ones((2, 512), np.float32), [tensor], "int8")
        others = [row for row in range(20) if row not in (3, 7)]
        assert got[:, others].tobytes() == clean[:, others].tobytes()


def test_threads_do_not_change_bits_and_rows_embed() -> None:
    for kind in ("q4_0", "q6_k", "iq4_xs"):
        tensor, x = random_blocks(kind, 200, 512), normal(np.random.default_rng(8), 40, 512)
        assert product(native("auto", 1), x, [tensor], "int8").tobytes() == (
            product(native("auto", 3), x, [tensor], "int8").tobytes()
        )
        table = native().matrix([tensor], Quantized(Blocks(kind)))
        got = apply_rows(native(), x, lambda g, t, table=table: g(Embed(table)), 512)
        np.testing.assert_array_equal(got, decoded(tensor)[:40])


def test_exported_bytes_come_back_as_the_same_weight() -> None:
    tensors = [random_blocks("q4_k", 32, 512), random_blocks("q6_k", 20, 512)]
    for backend in (native(), ReferenceBackend()):
        matrix = backend.matrix(tensors, Quantized(Blocks("q4_k")))
        about, data = backend.export(matrix)
        again = backend.restore(about, data)
        assert again.dequantize().tobytes() == matrix.dequantize().tobytes()
        x = normal(np.random.default_rng(9), 3, 512)
        got = [apply_rows(backend, x, lambda g, t, w=w: g(Linear(t, w)), 52) for w in (matrix, again)]
        assert got[0].tobytes() == got[1].tobytes()


def test_what_is_not_whole_blocks_is_refused() -> None:
    dtype = Quantized(Blocks("q4_k"))
    with pytest.raises(EngineError, match="cannot be packed as blocks"):
        native().matrix([Int8().outline(16, 256)], dtype)
    with pytest.raises(EngineError, match=r"not rounded to blocks|needs one to four"):
        native().matrix([np.zeros((16, 256), np.float32)], dtype)
    with pytest.raises(EngineError, match="multiple of 16 rows"):
        native().matrix([random_blocks("q4_k", 20, 256), random_blocks("q6_k", 16, 256)], dtype)
    with pytest.raises(EngineError, match="another size"):
        native().matrix([random_blocks("q4_k", 16, 256), random_blocks("q6_k", 16, 512)], dtype)
