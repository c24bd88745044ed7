"""GPTQ, AWQ and AutoRound: codes of 2, 3, 4 or 8 bits in words of 32 bits.

GPTQ (Frantar et al. 2022, arXiv:2210.17323): qweight [K bits / 32, O], streams down K; qzeros [G, O bits / 32], streams
along O; scales [G, O]; g_idx [K]. AWQ (Lin et al. 2023, arXiv:2306.00978): "gemm" has eight columns of O in a word, in
the order ORDER; "gemv" has streams along K.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from quire.errors import ModelError
from quire.weights.checkpoint.protocol import Checkpoint
from quire.weights.readers.fields import FLOATS, I16, I32, Fields, eights, num_words, unpack
from quire.weights.readers.grouped import Groups, check_order, group_count, is_plain, packed_groups, refuse
from quire.weights.readers.packed_modules import ModuleCheckpoint, Packed, setting
from quire.weights.readers.rules import Dynamic
from quire.weights.readers.scaled import ScaledCheckpoint
from quire.weights.tensor import Array

USED = ("qweight", "qzeros", "scales", "g_idx")
AWQ_USED = ("qweight", "qzeros", "scales")
BITS = (2, 3, 4, 8)
STREAMED = (*BITS, 5, 6, 7)  # AutoRound; GPTQModel packs these three in planes
AUTO_ROUND = ("auto-round", "intel/auto-round")
# Orders of 4 bits that single GPU kernels read, in files made for them.
KERNEL_ORDERS = ("marlin", "gemv_fast", "llm-awq")
ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # 1 in each field of a word


class GPTQCheckpoint(ModuleCheckpoint):
    """GPTQ of versions 1 and 2, act-order included, with rules for single modules (`dynamic`)."""

    def __init__(self, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> None:
        where = "quantization_config (gptq)"
        version = settings.get("checkpoint_format", settings.get("format")) or "gptq"
        if version == "marlin" or settings.get("is_marlin_format"):
            raise _kernel_order(where, "marlin")
        if version not in ("gptq", "gptq_v2"):
            raise refuse(where, f"checkpoint_format {version!r} is not read; gptq and gptq_v2 are")
        if settings.get("pack_dtype", "int32") != "int32":
            raise refuse(where, f"pack_dtype {settings['pack_dtype']!r} is not read; int32 is")
        find = partial(self._find, settings, Dynamic(settings), version == "gptq")
        super().__init__(checkpoint, find, USED)

    @staticmethod
    def _find(settings: Mapping[str, Any], rules: Dynamic, first: bool, fields: Fields) -> Packed:
        return gptq_module(fields, {**settings, **(rules.changes(fields.module) or {})}, first)


def _kernel_order(where: str, order: str) -> ModelError:
    return refuse(where, f"codes in the order of the GPU kernel {order} are not read")


def _shapes(fields: Fields) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Check the matrices of scales and of codes, and return their shapes."""
    fields.check("scales", FLOATS)
    fields.check("qweight", (I32,))
    scales, codes = fields.shape("scales"), fields.shape("qweight")
    if len(scales) != 2 or len(codes) != 2:
        raise fields.wrong("scales", "a matrix beside a matrix of codes")
    return scales, codes


def gptq_module(fields: Fields, settings: Mapping[str, Any], first: bool) -> Packed:
    """Read a GPTQ module. `first`: version 1, which stores zero points less one."""
    where = f"quantization_config of {fields.module}"
    bits, size = setting(settings, where, "bits", int), setting(settings, where, "group_size", int, -1)
    known = STREAMED if settings.get("quant_method") in AUTO_ROUND else BITS
    if bits not in known:
        raise refuse(where, f"bits = {bits} is not read; {', '.join(map(str, known))} are")
    (groups, rows), (words, _) = _shapes(fields)
    columns = words * 32 // bits
    fields.check("qweight", (I32,), (num_words(columns, bits), rows))
    size = columns if size == -1 else size
    group_count(fields, "scales", columns, size, groups)
    if "qzeros" in fields:
        fields.check("qzeros", (I32,), (groups, num_words(rows, bits)))
    if "g_idx" in fields:
        fields.check("g_idx", (I32,), (columns,))
    order = check_order(fields, "g_idx", groups) if "g_idx" in fields else None
    order = None if order is None or is_plain(order, size) else order
    symmetric = setting(settings, where, "sym", bool, True)
    read = partial(_gptq_groups, fields, bits, size, order, symmetric, first)
    return packed_groups((rows, columns), bits, size, symmetric, order, read, scales=fields.dtype("scales"))


def _gptq_groups(
    fields: Fields, bits: int, size: int, order: Array | None, symmetric: bool, first: bool
) -> Groups:
    scales = fields.floats("scales").T
    words = np.ascontiguousarray(fields.words("qweight").T)
    codes = unpack(words, bits, words.shape[1] * 32 // bits)
    middle = 1 << (bits - 1)
    zeros: Array | int = middle
    if "qzeros" in fields:
        stored = fields.words("qzeros")
        plain = unpack(stored, bits, scales.shape[0])
        if symmetric:
            if not ((plain == middle) | (plain == middle - 1)).all():
                raise fields.wrong(
                    "qzeros", f"{middle} or {middle - 1} everywhere, since the config says sym"
                )
        elif not first:
            zeros = plain.T
        elif bits not in ONES:
            zeros = ((plain + 1) & ((1 << bits) - 1)).T
        else:
            with np.errstate(over="ignore"):  # a field that overflows carries into the next one
                zeros = unpack(stored + np.uint32(ONES[bits]), bits, scales.shape[0]).T
    elif not symmetric:
        raise fields.wrong("qzeros", "there, since the config says that weights are not symmetric")
    return Groups(codes, np.ascontiguousarray(scales), zeros, size, order)


class AWQCheckpoint(ModuleCheckpoint):
    """AWQ of 4 bits in the orders gemm and gemv."""

    def __init__(self, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> None:
        where = "quantization_config (awq)"
        version = str(settings.get("version") or settings.get("format") or "gemm").lower()
        if version in KERNEL_ORDERS:
            raise _kernel_order(where, version)
        if version not in ("gemm", "gemv"):
            raise refuse(where, f"version {version!r:.80} is not read; gemm and gemv are")
        bits = settings.get("bits", settings.get("w_bit", 4))
        if bits != 4:
            raise refuse(where, f"bits = {bits!r:.80} is not read; AWQ has 4")
        size = settings.get("group_size", settings.get("q_group_size", 128))
        if type(size) is not int or not -1 <= size < 1 << 31:
            raise ModelError(f"{where}: group_size must be an integer, got {size!r:.80}")
        super().__init__(checkpoint, partial(_awq_module, version, size), AWQ_USED)


def _awq_module(version: str, size: int, fields: Fields) -> Packed:
    """Read a module in its order. Codes in words of 16 bits are gemv_fast's, whatever the config says."""
    if fields.is_of("qweight", I16):
        raise _kernel_order(fields.name("qweight"), "gemv_fast")
    return _gemm_module(size, fields) if version == "gemm" else _gemv_module(size, fields)


def _gemm_module(size: int, fields: Fields) -> Packed:
    (groups, rows), (columns, _) = _shapes(fields)
    fields.check("qweight", (I32,), (columns, num_words(rows, 4)))
    if rows % 8:
        raise fields.wrong("scales", "of a number of outputs that 8 divides")
    size = columns if size == -1 else size
    group_count(fields, "scales", columns, size, groups)
    fields.check("qzeros", (I32,), (groups, rows // 8))
    read = partial(_gemm_groups, fields, size)
    return packed_groups((rows, columns), 4, size, False, None, read, scales=fields.dtype("scales"))


def _gemm_groups(fields: Fields, size: int) -> Groups:
    scales = np.ascontiguousarray(fields.floats("scales").T)
    codes, zeros = (eights(fields.words(suffix)) for suffix in ("qweight", "qzeros"))
    return Groups(codes, scales, zeros, size)


def _gemv_module(size: int, fields: Fields) -> Packed:
    (scaled, scales), (rows, words) = _shapes(fields)
    columns = words * 8
    size = columns if size == -1 else size
    groups = -(-columns // max(size, 1))
    if size < 1 or scaled != rows or scales < groups:
        raise fields.wrong("scales", f"at least {[rows, groups]}")
    fields.check("qzeros", (I32,))
    if len(fields.shape("qzeros")) != 2 or fields.shape("qzeros")[0] != rows:
        raise fields.wrong("qzeros", f"of {rows} rows")
    if fields.shape("qzeros")[1] * 8 < groups:
        raise fields.wrong("qzeros", f"of at least {groups} groups")
    read = partial(_gemv_groups, fields, size, groups)
    return packed_groups((rows, columns), 4, size, False, None, read, scales=fields.dtype("scales"))


def _gemv_groups(fields: Fields, size: int, groups: int) -> Groups:
    codes = unpack(fields.words("qweight"), 4, fields.shape("qweight")[1] * 8)
    scales = np.ascontiguousarray(fields.floats("scales")[:, :groups])
    return Groups(codes, scales, unpack(fields.words("qzeros"), 4, groups), size)


def auto_round_checkpoint(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> Checkpoint:
    """Read AutoRound, which writes the tensors of GPTQ, AWQ or compressed-tensors; `packing_format` tells which."""
    packing = str(settings.get("packing_format") or "auto_round:auto_gptq")
    if settings.get("extra_config"):
        extra = setting(settings, "quantization_config", "extra_config", dict, {})
        rules = {f"(?:{re.escape(name)}|{name})$": changes for name, changes in extra.items()}
        settings = {**settings, "dynamic": rules}
    match packing.removeprefix("auto_round:"):
        case "auto_awq" | "awq":
            return AWQCheckpoint(checkpoint, {**settings, "version": "gemm"})
        case "auto_gptq" | "gptq":
            return GPTQCheckpoint(checkpoint, {**settings, "checkpoint_format": "gptq"})
        case "auto_round" | "gptqmodel":
            return GPTQCheckpoint(checkpoint, {**settings, "checkpoint_format": "gptq_v2"})
    if any(name.endswith((".weight_packed", ".weight_scale")) for name in checkpoint.names()):
        return ScaledCheckpoint(checkpoint, settings)
    raise refuse("quantization_config (auto-round)", f"packing_format {packing!r:.80} is not read")
