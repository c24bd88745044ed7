"""Tensors and config sections of quantized checkpoints as other libraries write and read them.

GPTQ and AWQ as AutoGPTQ and AutoAWQ write them, SqueezeLLM as its own tools do, all others as compressed-tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from quire.quantize.grid import Rounded
from quire.weights.layouts.blocks.make import round_fp8, round_mxfp4, round_nvfp4
from quire.weights.layouts.blocks.scaled import E2M1, in_pairs
from quire.weights.readers.fields import ORDER
from quire.weights.readers.gptq import ONES
from quire.weights.tensor import Array, Bytes, FloatArray

Tensors = Mapping[str, Array]
Encoded = tuple[dict[str, Array], FloatArray]  # tensors by suffix, and the values that they stand for


def stream(codes: Bytes, bits: int) -> Array:
    """Pack codes [R, L] of `bits` bits into words [R, L bits / 32]: one stream of whole words, low bits first."""
    fields = codes[..., None] >> np.arange(bits, dtype=np.uint8) & np.uint8(1)
    packed = np.packbits(fields.reshape(len(codes), -1), axis=1, bitorder="little")
    return packed.view("<u4")


def gptq_tensors(rounded: Rounded, bits: int, group: int) -> Encoded:
    """Make GPTQ's tensors in version 1, which stores zero points less one."""
    columns = rounded.codes.shape[1]
    if bits == 3:
        zeros = stream(((rounded.zeros.T - 1) & 7).astype(np.uint8), bits)
    else:
        with np.errstate(over="ignore"):  # a zero of 0 borrows from the next one
            zeros = stream(np.ascontiguousarray(rounded.zeros.T), bits) - np.uint32(ONES[bits])
    return {
        "qweight": np.ascontiguousarray(stream(rounded.codes, bits).T).view(np.int32),
        "qzeros": np.ascontiguousarray(zeros).view(np.int32),
        "scales": np.ascontiguousarray(rounded.scales.T).astype(np.float16),
        "g_idx": (np.arange(columns) // group).astype(np.int32),
    }, rounded.values()


def awq_tensors(rounded: Rounded) -> Encoded:
    def words(codes: Bytes) -> Array:
        eights = codes.T.reshape(codes.shape[1], -1, 8)[:, :, ORDER]
        return stream(np.ascontiguousarray(eights.reshape(codes.shape[1], -1)), 4).view(np.int32)

    return {
        "qweight": words(rounded.codes),
        "qzeros": words(rounded.zeros),
        "scales": np.ascontiguousarray(rounded.scales.T).astype(np.float16),
    }, rounded.values()


def squeezellm_tensors(
    codes: Bytes, tables: FloatArray, bits: int, rest: FloatArray | None = None
) -> Encoded:
    """Make SqueezeLLM's tensors. `rest` [O, K], mostly zeros, is added to the tables' values by a sparse matrix."""
    tensors: dict[str, Array] = {
        "qweight": np.ascontiguousarray(stream(codes, bits).T).view(np.int32),
        "lookup_table": tables.astype(np.float16),
    }
    values = np.take_along_axis(tables, codes.astype(np.intp), axis=1)
    if rest is not None and rest.any():
        counts = np.count_nonzero(rest, axis=1)
        tensors["rows"] = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        tensors["cols"] = np.nonzero(rest)[1].astype(np.int32)
        tensors["vals"] = rest[rest != 0]
        values = values + rest
    return tensors, values


def int8_tensors(weight: FloatArray) -> Encoded:
    scales = np.maximum(np.abs(weight).max(axis=1, keepdims=True), np.float32(1e-30)) / np.float32(127.5)
    codes = np.clip(np.rint(weight / scales), -128, 127).astype(np.int8)
    return {"weight": codes, "weight_scale": scales}, codes.astype(np.float32) * scales


def fp8_tensors(weight: FloatArray) -> Encoded:
    codes, scales = round_fp8(weight)
    held = codes.view(ml_dtypes.float8_e4m3fn)
    return {"weight": held, "weight_scale": scales}, held.astype(np.float32) * scales


def mxfp4_tensors(weight: FloatArray) -> Encoded:
    codes, exponents = round_mxfp4(weight)
    scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127).astype(np.float32)
    return {"weight_packed": in_pairs(codes), "weight_scale": exponents}, E2M1[codes] * scales.repeat(32, 1)


def nvfp4_tensors(weight: FloatArray, most: float) -> Encoded:
    """Make NVFP4's tensors. `most`: the largest magnitude of all weights that share an input, and the outer scale."""
    codes, inner, outer = round_nvfp4(weight, most)
    divisor = np.float32(1) / outer
    scales = inner.view(ml_dtypes.float8_e4m3fn).astype(np.float32) / divisor
    return {
        "weight_packed": in_pairs(codes),
        "weight_scale": inner.view(ml_dtypes.float8_e4m3fn),
        "weight_global_scale": divisor.reshape(1),
    }, E2M1[codes] * scales.repeat(16, 1)


def gptq_section(
    bits: int, group: int, symmetric: bool, damp: float, version: str, kept: Sequence[str]
) -> dict[str, Any]:
    """Make GPTQ's section. Experts of a layer are alike, so one rule of `dynamic` is enough for all of them."""
    rules = (re.sub(r"(?<=\.experts\\\.)\d+", r"\\d+", re.escape(module)) for module in kept)
    dynamic: dict[str, Any] = {f"-:{rule}$": {} for rule in rules}
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": False,
        "static_groups": True,
        "sym": symmetric,
        "lm_head": False,
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
        "true_sequential": True,
        "damp_percent": damp,
        "meta": {"quantizer": [f"quire:{version}"]},
        **({"dynamic": dynamic} if dynamic else {}),
    }


def awq_section(group: int, kept: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": list(kept) or None,
    }


def _scheme(**given: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "num_bits": 8,
    }
    rest: dict[str, Any] = {
        "observer": "minmax",
        "observer_kwargs": {},
        "scale_dtype": None,
        "strategy": "channel",
    }
    return {**plain, **rest, "symmetric": True, "type": "int", "zp_dtype": None, **given}


def compressed_section(method: str, kept: Sequence[str]) -> dict[str, Any]:
    """Make the section of smoothquant, int8-static, fp8, mxfp4 or nvfp4."""
    form, weights, inputs = {
        "smoothquant": ("int-quantized", _scheme(), _scheme(strategy="token", dynamic=True, observer=None)),
        "int8-static": ("int-quantized", _scheme(), _scheme(strategy="tensor")),
        "fp8": (
            "float-quantized",
            _scheme(type="float"),
            _scheme(type="float", strategy="token", dynamic=True, observer=None),
        ),
        "mxfp4": (
            "mxfp4-pack-quantized",
            _scheme(type="float", num_bits=4, strategy="group", group_size=32, scale_dtype="torch.uint8"),
            None,
        ),
        "nvfp4": (
            "nvfp4-pack-quantized",
            _scheme(
                type="float",
                num_bits=4,
                strategy="tensor_group",
                group_size=16,
                scale_dtype="torch.float8_e4m3fn",
            ),
            None,
        ),
    }[method]
    group = {
        "format": form,
        "input_activations": inputs,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "format": form,
        "global_compression_ratio": None,
        "ignore": ["lm_head", *kept],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.19.0",
    }
