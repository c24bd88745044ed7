"""Quantized tensors written here bit by bit, in sizes and orders that no sample has, and such as no library writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from quire.config import EngineConfig
from quire.engine.plan import plan_engine
from quire.errors import ConfigError, ModelError
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.checkpoint.safetensors import write_safetensors
from quire.weights.layouts import Blocks
from quire.weights.readers import load_reader
from quire.weights.schemes import Quantized
from tests.devices.native_cases import ISAS, linear, native
from tests.tiny import write_checkpoint

Tensors = dict[str, Any]


def write_stream(numbers: list[int], bits: int) -> Any:
    """Numbers of `bits` bits in words of 32, the low bits first."""
    whole = sum(number << i * bits for i, number in enumerate(numbers))
    count = -(-len(numbers) * bits // 32)
    return np.frombuffer(whole.to_bytes(4 * count, "little"), np.int32)


def streams(numbers: Any, bits: int) -> Any:
    return np.stack([write_stream([int(n) for n in row], bits) for row in numbers])


def read(path: Path, method: str, tensors: Tensors, **settings: Any) -> Checkpoint:
    save_file(
        {k: np.ascontiguousarray(v) for k, v in tensors.items() if v is not None}, path / "model.safetensors"
    )
    return load_reader(method)(open_checkpoint(path), settings)


def gptq(
    rows: int, columns: int, bits: int, size: int, *, first: bool, order: Any = None
) -> tuple[Tensors, Any]:
    rng = np.random.default_rng(bits)
    groups = -(-columns // size)
    codes, zeros = rng.integers(0, 1 << bits, (rows, columns)), rng.integers(1, 1 << bits, (rows, groups))
    scales = rng.standard_normal((rows, groups)).astype(np.float16)
    of = np.arange(columns) // size if order is None else order
    values = (codes - zeros[:, of]).astype(np.float32) * scales.astype(np.float32)[:, of]
    tensors = {
        "a.qweight": streams(codes, bits).T,
        "a.qzeros": streams((zeros - first).T, bits),
        "a.scales": scales.T,
        "a.g_idx": None if order is None else order.astype(np.int32),
    }
    return tensors, values


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("bits", "size", "rows", "columns"),
    [(2, 16, 32, 48), (3, 32, 32, 96), (4, 96, 8, 192), (4, 24, 16, 40), (8, 32, 12, 64), (8, 128, 4, 128)],
)
def test_gptq_of_all_sizes(
    bits: int, size: int, rows: int, columns: int, first: bool, tmp_path: Path
) -> None:
    tensors, values = gptq(rows, columns, bits, size, first=first)
    form = "gptq" if first else "gptq_v2"
    settings = {"bits": bits, "group_size": size, "sym": False, "checkpoint_format": form}
    checkpoint = read(tmp_path, "gptq", tensors, **settings)
    np.testing.assert_array_equal(checkpoint.get("a.weight"), values)
    if checkpoint.layout("a.weight") is not None:
        held = checkpoint.quantized("a.weight", np.arange(rows)).dequantize()
        np.testing.assert_array_equal(held, values)


def test_gptq_in_any_order(tmp_path: Path) -> None:
    order = np.random.default_rng(0).permutation(np.arange(64) // 16)
    tensors, values = gptq(8, 64, 4, 16, first=True, order=order)
    checkpoint = read(tmp_path, "gptq", tensors, bits=4, group_size=16, sym=False, desc_act=True)
    np.testing.assert_array_equal(checkpoint.get("a.weight"), values)
    assert checkpoint.layout("a.weight") is None


def test_a_zero_point_of_0_carries_into_the_next_one(tmp_path: Path) -> None:
    """Version 1 takes 1 from whole words, so that a field of 0 borrows."""
    tensors, _ = gptq(8, 32, 4, 32, first=False)
    zeros = [5, 0, 7, 3, 0, 0, 1, 9]
    word = (int(write_stream(zeros, 4).view(np.uint32)[0]) - 0x11111111) % (1 << 32)
    tensors["a.qzeros"] = np.array([[word]], np.uint32).view(np.int32)
    tensors["a.qweight"][:] = 0
    tensors["a.scales"][:] = 1
    checkpoint = read(tmp_path, "gptq", tensors, bits=4, group_size=32, sym=False)
    np.testing.assert_array_equal(checkpoint.get("a.weight")[:, 0], -np.array(zeros, np.float32))


@pytest.mark.parametrize(("bits", "columns"), [(3, 64), (4, 72), (5, 64), (8, 40)])
@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_compressed_tensors_streams(
    bits: int, columns: int, zeros: bool, padded: bool, tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    rows, size = 32, 8
    codes = rng.integers(0, 1 << bits, (rows, columns))
    points = rng.integers(0, 1 << bits, (rows, columns // size))
    scales = rng.standard_normal(points.shape).astype(np.float32)

    def pack(numbers: Any) -> Any:
        if not padded:
            return streams(numbers, bits)
        each = 32 // bits
        parts = [numbers[:, i : i + each] for i in range(0, numbers.shape[1], each)]
        return np.concatenate([streams(part, bits) for part in parts], axis=1)

    tensors = {
        "a.weight_packed": pack(codes),
        "a.weight_scale": scales,
        "a.weight_shape": np.array([rows, columns], np.int64),
        "a.weight_zero_point": pack(points.T).T if zeros else None,
    }
    settings = {
        "config_groups": {"0": {"weights": {"num_bits": bits}}},
        "version": "0.9" if padded else "0.12",
    }
    checkpoint = read(tmp_path, "compressed-tensors", tensors, **settings)
    middle = points.repeat(size, 1) if zeros else 1 << (bits - 1)
    values = (codes - middle).astype(np.float32) * scales.repeat(size, 1)
    np.testing.assert_array_equal(checkpoint.get("a.weight"), values)


@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu, np.uint8])
def test_fp8_blocks_may_end_early_and_scales_be_exponents(kind: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    weight = rng.standard_normal((200, 70)).astype(ml_dtypes.float8_e4m3fn)
    powers = rng.integers(-4, 5, (4, 3))
    scales = (powers + 127).astype(np.uint8) if kind is np.uint8 else (2.0**powers).astype(kind)
    held = scales.view(np.uint8) if kind is ml_dtypes.float8_e8m0fnu else scales
    tensors = {"a.weight": weight.view(np.uint8), "a.weight_scale_inv": held}
    path = tmp_path / "model.safetensors"
    save_file({name: np.ascontiguousarray(t) for name, t in tensors.items() if name != "a.weight"}, path)
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + size].decode().rstrip()
    end = held.nbytes
    header = (
        header[:-1]
        + f',"a.weight":{{"dtype":"F8_E4M3","shape":[200,70],"data_offsets":[{end},{end + 14000}]}}}}'
    )
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + raw[8 + size :] + weight.tobytes())
    checkpoint = load_reader("fp8")(open_checkpoint(tmp_path), {"weight_block_size": [64, 32]})
    spread = (2.0**powers).repeat(64, 0)[:200].repeat(32, 1)[:, :70]
    np.testing.assert_array_equal(
        checkpoint.get("a.weight"), weight.astype(np.float32) * spread.astype(np.float32)
    )


def broken(change: Callable[[Tensors], Any]) -> Tensors:
    tensors, _ = gptq(8, 64, 4, 16, first=True, order=np.arange(64) // 16)
    change(tensors)
    return tensors


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda t: t.update({"a.scales": t["a.scales"][:3]}),
            "a.scales must be one for each group of 16 of 64",
        ),
        (lambda t: t.update({"a.scales": t["a.scales"].astype(np.int32)}), "a.scales must be float32"),
        (lambda t: t["a.scales"].__setitem__((0, 0), np.nan), "a.scales must be finite"),
        (lambda t: t["a.g_idx"].__setitem__(3, 4), "a.g_idx must be groups from 0 to 3"),
        (lambda t: t["a.g_idx"].__setitem__(3, -1), "a.g_idx must be groups from 0 to 3"),
        (lambda t: t.update({"a.g_idx": t["a.g_idx"][:5]}), "a.g_idx must be int32"),
        (lambda t: t.update({"a.qzeros": t["a.qzeros"][:, :0]}), "a.qzeros must be int32"),
        (lambda t: t.update({"a.qzeros": None}), "a.qzeros is missing"),
        (lambda t: t.update({"a.scales": None}), "a.scales is missing"),
        (lambda t: t.update({"a.qweight": t["a.qweight"].reshape(-1)}), "a matrix of codes"),
    ],
)
def test_modules_that_are_not_whole_name_their_tensor(
    change: Callable[[Tensors], Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=said):
        read(tmp_path, "gptq", broken(change), bits=4, group_size=16, sym=False).get("a.weight")


@pytest.mark.parametrize(
    ("method", "settings", "said"),
    [
        ("gptq", {"bits": 5, "group_size": 16}, "bits = 5"),
        ("gptq", {"bits": "4"}, "bits must be of type int"),
        ("gptq", {"bits": 4, "checkpoint_format": "bitblas"}, "'bitblas' is not read"),
        (
            "gptq",
            {"bits": 4, "dynamic": {"(?!a)b": {"bits": 8}}},
            "dynamic: the expression .* not supported at",
        ),
        ("gptq", {"bits": 4, "dynamic": ["a"]}, "dynamic must be an object"),
        ("gptq", {"bits": 4, "dynamic": {"a" * 5000: {}}}, "more than 4096 characters"),
        ("gptq", {"bits": 4, "group_size": 0}, "one for each group of 0"),
        ("gptq", {"bits": 4, "dynamic": {"(": {}}}, "is not supported at"),
        ("awq", {"version": "ipex"}, "'ipex' is not read"),
        ("awq", {"version": "gemv_fast"}, "order of the GPU kernel gemv_fast"),
        ("awq", {"version": "Marlin"}, "order of the GPU kernel marlin"),
        ("gptq", {"bits": 4, "checkpoint_format": "marlin"}, "order of the GPU kernel marlin"),
        ("gptq", {"bits": 4, "is_marlin_format": True}, "order of the GPU kernel marlin"),
        ("awq", {"bits": 3}, "AWQ has 4"),
        ("auto-round", {"packing_format": "x"}, "packing_format 'x'"),
        ("squeezellm", {"wbits": 2}, "wbits = 2"),
        ("compressed-tensors", {"format": "marlin-24"}, "marlin-24"),
        ("compressed-tensors", {"transform_config": {"a": 1}}, "transform_config"),
        ("modelopt", {"quantization": {"quant_algo": "NVFP4_SVD"}}, "NVFP4_SVD"),
        ("fp8", {"weight_block_size": [0, 128]}, "weight_block_size must be two numbers"),
        ("compressed-tensors", {"config_groups": []}, "config_groups is missing"),
        ("compressed-tensors", {"config_groups": {"g": {"targets": [7]}}}, "targets must be a list of texts"),
        ("compressed-tensors", {"config_groups": {"g": {"targets": ["re:("]}}}, "is not supported at"),
        ("compressed-tensors", {"config_groups": {"g": {"targets": 5}}}, "targets must be a list of texts"),
        ("compressed-tensors", {"config_groups": {"g": {}}, "ignore": 5}, "ignore must be a list of texts"),
        ("fp8", {}, "no quantized weight of a known kind|weight"),
    ],
)
def test_formats_that_are_not_read_are_refused_by_name(
    method: str, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    tensors = broken(lambda t: None)
    if method == "fp8":
        tensors = {"a.weight": np.zeros((4, 4), np.int32), "a.weight_scale": np.ones(1, np.float32)}
    with pytest.raises(ModelError, match=said):
        read(tmp_path, method, tensors, **settings)


def test_words_of_16_bits_are_refused_by_the_name_of_their_kernel(tmp_path: Path) -> None:
    tensors = {"a.qweight": np.zeros((32, 128), np.int16), "a.scales": np.ones((8, 128), np.float16)}
    with pytest.raises(ModelError, match=r"a\.qweight: .* order of the GPU kernel gemv_fast are not read"):
        read(tmp_path, "awq", tensors, w_bit=4, q_group_size=128)


@pytest.mark.parametrize("name", ["gptq_model-4bit-128g.safetensors", "4bit-128g.safetensors"])
def test_the_one_file_of_weights_may_have_a_tool_s_name(name: str, tmp_path: Path) -> None:
    tensors, values = gptq(8, 64, 4, 16, first=True)
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items() if v is not None}, tmp_path / name)
    settings = {"bits": 4, "group_size": 16, "sym": False}
    checkpoint = load_reader("gptq")(open_checkpoint(tmp_path), settings)
    np.testing.assert_array_equal(checkpoint.get("a.weight"), values)


@pytest.mark.parametrize(
    ("name", "method", "said"),
    [
        ("awq", "awq", ""),
        ("awq_marlin", "awq", ""),
        ("auto_gptq", "gptq", ""),
        ("modelopt_mixed", "modelopt", ""),
        ("gptq", "awq", "--quantization gptq: the model is quantized by awq"),
        ("squeezellm", None, "--quantization squeezellm: the model is not quantized"),
    ],
)
def test_a_method_that_is_named_must_be_the_checkpoint_s(
    name: str, method: str | None, said: str, tmp_path: Path
) -> None:
    section = {} if method is None else {"quantization_config": {"quant_method": method}}
    directory = write_checkpoint(tmp_path / "model", **section)
    config = EngineConfig.from_options(model=str(directory), quantization=name)
    if not said:
        plan_engine(config)
        return
    with pytest.raises(ConfigError, match=said):
        plan_engine(config)


@pytest.mark.parametrize("bits", [5, 6, 7])
@pytest.mark.parametrize("packing", ["auto_round:auto_gptq", "auto_round"])
def test_auto_round_streams_of_5_to_7_bits(bits: int, packing: str, tmp_path: Path) -> None:
    tensors, values = gptq(32, 64, bits, 32, first=packing == "auto_round:auto_gptq")
    settings = {"quant_method": "auto-round", "packing_format": packing, "bits": bits, "group_size": 32}
    checkpoint = read(tmp_path, "auto-round", tensors, sym=False, **settings)
    np.testing.assert_array_equal(checkpoint.get("a.weight"), values)
    held = checkpoint.quantized("a.weight", np.arange(32)).dequantize()
    np.testing.assert_array_equal(held, values)


@pytest.mark.parametrize(("kind", "order"), [("int4", "reorder"), ("uint4", "reorder"), ("uint4", "order")])
def test_quark_words_along_the_outputs(kind: str, order: str, tmp_path: Path) -> None:
    rng, rows, columns, size = np.random.default_rng(3), 32, 64, 32
    codes, zeros = rng.integers(0, 16, (rows, columns)), rng.integers(0, 16, (rows, columns // size))
    scales = rng.standard_normal(zeros.shape).astype(np.float32)
    places = (0, 2, 4, 6, 1, 3, 5, 7) if order == "reorder" else tuple(range(8))

    def packed(numbers: Any) -> Any:
        return streams(
            numbers.T.reshape(numbers.shape[1], -1, 8)[:, :, places].reshape(numbers.shape[1], -1), 4
        )

    signed = kind == "int4"
    tensors = {
        "a.weight": packed(codes),
        "a.weight_scale": scales.T,
        "a.weight_zero_point": None if signed else packed(zeros),
    }
    settings = {"global_quant_config": {"weight": {"dtype": kind}}, "export": {"pack_method": order}}
    checkpoint = read(tmp_path, "quark", tensors, **settings)
    numbers = np.where(codes > 7, codes - 16, codes) if signed else codes - zeros.repeat(size, 1)
    values = numbers.astype(np.float32) * scales.repeat(size, 1)
    np.testing.assert_array_equal(checkpoint.get("a.weight"), values)
    with pytest.raises(ModelError, match="dtype 'int3' in 'reorder' is not read"):
        read(tmp_path, "quark", tensors, global_quant_config={"weight": {"dtype": "int3"}})


def write(path: Path, tensors: Tensors) -> None:
    write_safetensors(
        path / "model.safetensors", {name: np.ascontiguousarray(t) for name, t in tensors.items()}
    )


def test_mxfp8_is_held_with_its_exponents(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    weight = rng.standard_normal((32, 96)).astype(ml_dtypes.float8_e4m3fn)
    powers = rng.integers(-9, 9, (32, 3))
    for method, name, settings in (
        ("mxfp8", "weight_scale_inv", {"quant_method": "mxfp8", "weight_block_size": [1, 32]}),
        ("compressed-tensors", "weight_scale", {"format": "mxfp8-quantized"}),
    ):
        write(tmp_path, {"a.weight": weight, f"a.{name}": (powers + 127).astype(np.uint8)})
        checkpoint = load_reader(method)(open_checkpoint(tmp_path), settings)
        values = weight.astype(np.float32) * (2.0**powers).repeat(32, 1).astype(np.float32)
        np.testing.assert_array_equal(checkpoint.get("a.weight"), values)
        assert checkpoint.layout("a.weight") == Blocks("mxfp8")
        np.testing.assert_array_equal(checkpoint.quantized("a.weight", np.arange(32)).dequantize(), values)


def test_mxfp6_is_not_taken_for_mxfp4(tmp_path: Path) -> None:
    rng, rows, columns = np.random.default_rng(5), 16, 64
    codes, powers = rng.integers(0, 64, (rows, columns)), rng.integers(-5, 5, (rows, 2))
    packed = np.stack([write_stream([int(n) for n in row], 6) for row in codes]).view(np.uint8)
    write(tmp_path, {"a.weight_packed": packed, "a.weight_scale": (powers + 127).astype(np.uint8)})
    checkpoint = load_reader("compressed-tensors")(
        open_checkpoint(tmp_path), {"format": "mxfp6-pack-quantized"}
    )
    size, exponents = codes & 7, codes >> 3 & 3
    numbers = np.where(exponents == 0, size / 8, (1 + size / 8) * 2.0 ** (exponents - 1)) * np.where(
        codes > 31, -1, 1
    )
    values = (numbers * (2.0**powers).repeat(32, 1)).astype(np.float32)
    np.testing.assert_array_equal(checkpoint.get("a.weight"), values)


def test_floats_beside_scales_stay_floats(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Checkpoints of compressed-tensors whose status is frozen hold both."""
    weight = np.arange(64, dtype=np.float32).reshape(8, 8)
    write(tmp_path, {"a.weight": weight, "a.weight_scale": np.ones((8, 1), np.float32)})
    checkpoint = load_reader("compressed-tensors")(
        open_checkpoint(tmp_path), {"quantization_status": "frozen"}
    )
    assert list(checkpoint.names()) == ["a.weight"]
    assert checkpoint.get("a.weight").tobytes() == weight.tobytes()
    assert "1 modules have scales beside float weights, which are taken: a" in caplog.text


@pytest.mark.parametrize(
    ("bits", "packing"), [(1, "1bit_u8"), (2, "2bit_u8"), (4, "4bit_u8"), (8, "8bit_u8"), (3, "3bit_32")]
)
@pytest.mark.parametrize("axis", [0, 1])
def test_hqq_along_both_axes(bits: int, packing: str, axis: int, tmp_path: Path) -> None:
    rng, rows, columns, size = np.random.default_rng(6), 40, 64, 32
    groups = rows * columns // size
    shape = (groups, size) if axis else (size, groups)
    codes = rng.integers(0, 1 << bits, shape)
    scale, zero = (
        rng.standard_normal((groups, 1) if axis else (1, groups)).astype(np.float32) for _ in range(2)
    )
    each = 10 if bits == 3 else 8 // bits
    wide = np.concatenate([codes, np.zeros((-len(codes) % each, codes.shape[1]), np.int64)])
    parts = wide.reshape(each, -1, codes.shape[1])
    packed = sum(part << bits * (each - 1 - i) for i, part in enumerate(parts))
    tensors = {
        "a.W_q": packed.astype(np.int32 if bits == 3 else np.uint8),
        "a.scale": scale,
        "a.zero": zero,
        "a.shape": np.array([rows, columns], np.int64),
        "a.packing": np.frombuffer(packing.encode(), np.uint8),
        **{
            f"a.{k}": np.array(v, np.int32)
            for k, v in {"nbits": bits, "group_size": size, "axis": axis}.items()
        },
    }
    write(tmp_path, tensors)
    checkpoint = load_reader("hqq")(open_checkpoint(tmp_path), {})
    values = ((codes.astype(np.float32) - zero) * scale).reshape(rows, columns)
    np.testing.assert_array_equal(checkpoint.get("a.weight"), values)
    if checkpoint.layout("a.weight") is not None:
        np.testing.assert_array_equal(checkpoint.quantized("a.weight", np.arange(rows)).dequantize(), values)
    assert (checkpoint.layout("a.weight") is not None) == (axis == 1)
    write(tmp_path, {**tensors, "a.W_q": tensors["a.W_q"].view(np.float16)})  # view_as_float
    again = load_reader("hqq")(open_checkpoint(tmp_path), {})
    np.testing.assert_array_equal(again.get("a.weight"), values)


@pytest.mark.parametrize("bits", [3, 4])
def test_squeezellm_s_outliers_stay_beside_the_table(bits: int, tmp_path: Path) -> None:
    """Some rows have none, others many; picked rows keep theirs, and products on every instruction set have them."""
    rng, rows, columns = np.random.default_rng(8), 48, 128
    codes, table = (
        rng.integers(0, 1 << bits, (rows, columns)),
        rng.standard_normal((rows, 1 << bits)).astype(np.float32),
    )
    counts = rng.integers(0, 6, rows) * (np.arange(rows) % 3)
    at = np.concatenate([np.sort(rng.permutation(columns)[:count]) for count in counts]).astype(np.int32)
    extra = rng.standard_normal(len(at)).astype(np.float32)
    tensors = {
        "a.qweight": streams(codes, bits).T,
        "a.lookup_table": table,
        "a.rows": np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        "a.cols": at,
        "a.vals": extra,
    }
    checkpoint = read(tmp_path, "squeezellm", tensors, wbits=bits)
    values = np.take_along_axis(table, codes, 1)
    values[np.repeat(np.arange(rows), counts), at] += extra
    np.testing.assert_array_equal(checkpoint.get("a.weight"), values)
    layout = checkpoint.layout("a.weight")
    assert isinstance(layout, Blocks)
    picked = np.array([5, 2, 2, 47, *range(12)])
    tensor = checkpoint.quantized("a.weight", picked)
    np.testing.assert_array_equal(tensor.dequantize(), values[picked])
    x = rng.standard_normal((21, columns)).astype(np.float32)
    whole = checkpoint.quantized("a.weight", np.arange(rows))
    outlined = layout.outline(rows, columns)
    for isa in ISAS:
        backend = native(isa)
        matrix = backend.matrix([whole], Quantized(layout, "float"))
        np.testing.assert_array_equal(matrix.dequantize(), values)
        planned = backend.outline().matrix([outlined], Quantized(layout, "float"))
        assert matrix.nbytes <= planned.nbytes <= matrix.nbytes + 8 * rows
        got = linear(backend, x, whole, Quantized(layout, "float"))
        np.testing.assert_allclose(got, x @ values.T, atol=2e-4)
        assert linear(backend, x[:1], whole, Quantized(layout, "float")).tobytes() == got[:1].tobytes()
        dense = replace(whole, sparse=None)
        both = backend.matrix([whole, dense], Quantized(layout, "float"))
        np.testing.assert_array_equal(both.dequantize()[rows:], dense.dequantize())
        about, data = backend.export(matrix)
        aligned = np.empty(len(data) + 64, np.uint8)
        start = -aligned.ctypes.data % 64
        aligned[start : start + len(data)] = data
        again = backend.restore(about, aligned[start : start + len(data)])
        np.testing.assert_array_equal(again.dequantize(), values)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, np.int8])
@pytest.mark.parametrize(
    ("rows", "columns", "scales"),
    [(4, 512, (1, 4)), (2, 32, (1, 2)), (1, 192, (1, 2)), (4, 64, (4, 1)), (4, 64, (4,)), (4, 64, (1,)),
     (3, 512, (1, 1, 4, 1)), (200, 300, (2, 3)), (3, 256, (3, 2))],
)  # fmt: skip
def test_axes_of_scales_tell_blocks_from_rows(
    rows: int, columns: int, scales: tuple[int, ...], dtype: Any, tmp_path: Path
) -> None:
    """A projection of few rows may have as many of them as blocks in a row."""
    rng = np.random.default_rng(rows)
    codes = rng.integers(-8, 8, (rows, columns)).astype(dtype)
    factors = rng.uniform(1, 2, scales).astype(np.float32)
    size = [128, 16] if columns == 32 else [128, 128]
    tensors = {"a.weight": codes, "a.weight_scale_inv": factors}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    checkpoint = load_reader("fp8")(open_checkpoint(tmp_path), {"weight_block_size": size})
    pairs = factors.reshape([n for i, n in enumerate(scales) if len(scales) < 4 or i % 2 == 0])
    pairs = pairs.reshape(len(pairs), -1)
    tall, wide = 1 if len(pairs) == rows else size[0], size[1] if pairs.shape[1] > 1 else columns
    spread = pairs.repeat(tall, 0)[:rows].repeat(wide, 1)[:, :columns]
    right = codes.astype(np.float32) * np.broadcast_to(spread, (rows, columns))
    np.testing.assert_allclose(checkpoint.get("a.weight"), right, rtol=1e-6)
    if checkpoint.layout("a.weight") is not None:
        found = checkpoint.quantized("a.weight", np.arange(rows)).dequantize()
        np.testing.assert_allclose(found, right, rtol=1e-6)


def test_zero_points_that_the_config_asks_for_must_be_there(tmp_path: Path) -> None:
    tensors = {"a.weight": np.ones((8, 32), np.int8), "a.weight_scale": np.ones((8, 1), np.float32)}
    about = {"num_bits": 8, "type": "int", "symmetric": False}
    settings = {"config_groups": {"g": {"targets": ["Linear"], "weights": about}}}
    with pytest.raises(ModelError, match=r"a\.weight_zero_point is missing"):
        read(tmp_path, "compressed-tensors", tensors, **settings)
    tensors["a.weight_zero_point"] = np.ones((8, 1), np.int8)
    assert not read(tmp_path, "compressed-tensors", tensors, **settings).get("a.weight").any()
