"""Blocks of quantized rows taken apart: codes side by side, scales and offsets, as kernels read them.

A layout's own decoder takes them apart. Where scales are 1 and offsets 0 it gives codes; where codes are 1, scales;
where codes are 0, offsets. So a kind is described by the bytes to put in their places.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quire.devices.cuda.kernels.packed import E2M1_TWICE, Form
from quire.weights.layouts import Blocks
from quire.weights.layouts.blocks import KINDS
from quire.weights.layouts.blocks.decode_grids import STEPS_2, STEPS_3_S, STEPS_3_XXS
from quire.weights.layouts.blocks.decode_plain import NONLINEAR
from quire.weights.layouts.blocks.scaled import FP4, NF4
from quire.weights.tensor import FloatArray, QuantTensor

Patches = tuple[tuple[int, int, str] | tuple[int, int, str, str], ...]
"""Bytes of a block, from the first to the last (not included): a pattern in hexadecimal that fills them, and a mask of
bits that keep what they were.
"""


@dataclass(frozen=True, slots=True)
class Probe:
    """How to take blocks apart whose groups have `group` columns: patches for scales, equal codes and codes of 0.

    Codes are `times` what is decoded, less `shift`; with a `table`, places of these numbers in it. Without numbers rows
    begin with their own.
    """

    form: Form
    scales: Patches
    ones: Patches
    zeros: Patches = ()
    times: int = 1
    shift: int = 0
    table: tuple[float, ...] = ()


HALF, SINGLE, NOTHING = "003c", "0000803f", "00"
BYTES, PAIRS = torch.int8, torch.uint8


def _bytes(number: str, size: int) -> Probe:
    """Describe blocks of `size` bytes behind their scale in float32, or rows of them (0)."""
    kind, one = {
        "int8": (BYTES, "81"),
        "e4m3": (torch.float8_e4m3fn, "38"),
        "e5m2": (torch.float8_e5m2, "3c"),
    }[number]
    first = 4 if size else 0
    return Probe(Form(kind, size), ((0, 4, SINGLE),) if size else (), ((first, first + (size or 32), one),))


def _affine(bits: int, size: int) -> Probe:
    """Describe codes behind a scale and a zero point."""
    end, ones = 8 + size * bits // 8, "11" if bits == 4 else "01"
    form = Form(PAIRS if bits == 4 else BYTES, size, offsets=True)
    heads = (0, 4, SINGLE), (4, 8, NOTHING)
    return Probe(
        form, heads, ((4, 8, NOTHING), (8, end, ones)), ((8, end, NOTHING),), shift=0 if bits == 4 else 128
    )


def _listed(size: int, numbers: Iterable[float], scales: Patches, ones: Patches, times: int = 1) -> Probe:
    """Describe codes that are places in a table of `times` their values."""
    table = tuple(sorted(map(float, numbers)))
    return Probe(Form(PAIRS, size, table=True), scales, ones, times=times, table=table)


def _signed(numbers: Sequence[int]) -> list[int]:
    return [sign * number for number in numbers for sign in (1, -1)]


EIGHTHS = [8 * whole + delta for whole in (-1, 0, 1) for delta in (1, -1)]
UNSCALED: Patches = ((0, 2, HALF),)
K_SCALES: Patches = (0, 2, HALF), (2, 4, NOTHING), (4, 8, "01"), (8, 12, NOTHING), (12, 16, "01")
PROBES: Mapping[str, Probe] = {
    **{f"{number}_{size}": _bytes(number, size) for number in ("int8", "e4m3", "e5m2") for size in (32, 128)},
    "e4m3": _bytes("e4m3", 0),
    "e5m2": _bytes("e5m2", 0),
    "mxfp8": Probe(Form(torch.float8_e4m3fn, 32), ((0, 1, "7f"),), ((1, 33, "38"),)),
    "mxfp4": Probe(Form(PAIRS, 32, e2m1=True), ((0, 1, "80"),), ((1, 17, "11"),)),
    **{
        kind: Probe(Form(PAIRS, 16, e2m1=True), ((0, 4, "38"),), ((4, 36, "11"),), times=2)
        for kind in ("nvfp4", "nvfp4_div")
    },
    **{f"affine{bits}_{size}": _affine(bits, size) for bits, size in ((4, 32), (4, 64), (8, 32), (8, 128))},
    "q8_0": Probe(Form(BYTES, 32), ((0, 2, HALF),), ((2, 34, "01"),)),
    "q4_0": Probe(Form(PAIRS, 32), ((0, 2, HALF),), ((2, 18, "99"),), shift=-8),
    "q5_0": Probe(Form(BYTES, 32), ((0, 2, HALF),), ((2, 6, "ff"), (6, 22, "11"))),
    "iq4_nl": _listed(32, NONLINEAR, UNSCALED, ((2, 18, "88"),)),
    "iq4_xs": _listed(32, NONLINEAR, (*UNSCALED, (2, 4, "aa"), (4, 8, "11")), ((8, 136, "88"),)),
    "iq3_xxs": _listed(
        32, _signed(STEPS_3_XXS), (*UNSCALED, (66, 98, "00000000", "ffffff0f")),
        ((2, 66, "00"), (66, 98, "00000000", "000000f0")), 4,
    ),
    "iq3_s": _listed(32, _signed(STEPS_3_S), (*UNSCALED, (106, 110, "00")), ((2, 106, "00"),)),
    "iq2_xxs": _listed(
        32, _signed(STEPS_2), (*UNSCALED, (2, 66, 8 * "00", 7 * "ff" + "0f")), ((2, 66, 8 * "00", 7 * "00" + "f0"),), 8
    ),
    "iq2_xs": _listed(16, _signed(STEPS_2), (*UNSCALED, (66, 74, "00")), ((2, 66, "00"),), 8),
    "iq2_s": _listed(16, _signed(STEPS_2), (*UNSCALED, (74, 82, "00")), ((2, 74, "00"),), 8),
    "iq1_s": _listed(
        32, EIGHTHS, (*UNSCALED, (34, 50, "0000", "ff8f")), ((2, 34, "00"), (34, 50, "0000", "0070")), 8
    ),
    "iq1_m": _listed(16, EIGHTHS, ((48, 56, "0000000000c00030"),), ((0, 48, "00"),), 8),
    "tq1_0": Probe(Form(PAIRS, 128), ((52, 54, HALF),), ((0, 52, "ff"),), shift=-8),
    "tq2_0": Probe(Form(PAIRS, 128), ((64, 66, HALF),), ((0, 64, "aa"),), shift=-8),
    "nf4": _listed(64, NF4, ((0, 4, SINGLE),), ((4, 36, "ff"),)),
    "fp4": _listed(64, {*FP4}, ((0, 4, SINGLE),), ((4, 36, "33"),)),
    **{kind: Probe(Form(PAIRS, table=True), (), ()) for kind in ("lut3", "lut4")},
    "q4_1": Probe(
        Form(PAIRS, 32, offsets=True), ((0, 2, HALF), (2, 4, NOTHING)), ((2, 4, NOTHING), (4, 20, "11")),
        ((4, 20, NOTHING),),
    ),
    "q5_1": Probe(
        Form(BYTES, 32, offsets=True), ((0, 2, HALF), (2, 4, NOTHING)),
        ((2, 8, NOTHING), (8, 24, "11")), ((4, 24, NOTHING),),
    ),
    "q2_k": Probe(
        Form(PAIRS, 16, offsets=True), ((0, 16, "01"), (80, 82, HALF), (82, 84, NOTHING)),
        ((16, 80, "55"), (82, 84, NOTHING)), ((16, 80, NOTHING),),
    ),
    "q3_k": Probe(
        Form(PAIRS, 16), ((96, 104, "11"), (104, 108, "aa"), (108, 110, HALF)), ((0, 32, "ff"), (32, 96, "55")),
        shift=-8,
    ),
    "q4_k": Probe(
        Form(PAIRS, 32, offsets=True), K_SCALES, ((2, 4, NOTHING), (16, 144, "11")), ((16, 144, NOTHING),)
    ),
    "q5_k": Probe(
        Form(BYTES, 32, offsets=True), K_SCALES, ((2, 4, NOTHING), (16, 48, NOTHING), (48, 176, "11")),
        ((16, 176, NOTHING),),
    ),
    "q6_k": Probe(Form(BYTES, 16), ((192, 208, "01"), (208, 210, HALF)), ((0, 128, "11"), (128, 192, "aa"))),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Apart:
    """A weight as PackedWeight.pack takes it: codes [O, K], scales and offsets [O, groups]."""

    form: Form
    codes: Any
    scales: Any
    offsets: Any = None
    table: Any = None

    def alike(self, form: Form) -> Apart:
        """Put the values in a form with codes of int8, which has offsets or not, and groups that divide these."""
        times = self.form.group // form.group
        codes = self.form.widened(self.codes) if self.form.bits == 4 else self.codes
        if self.table is not None:
            codes = self.table.gather(1, self.codes.long()).to(torch.int8)
        scales, offsets = self.scales.repeat_interleave(times, 1), self.offsets
        if form.offsets:
            offsets = torch.zeros_like(scales) if offsets is None else offsets.repeat_interleave(times, 1)
        return Apart(form, codes, scales, offsets)


def common_form(forms: Sequence[Form]) -> Form | None:
    """Return the form of one weight of parts of these forms; None if there is none."""
    if len(set(forms)) == 1:
        return forms[0]
    if any(
        form.number not in (BYTES, PAIRS) or not form.group or (form.table and form.group == 64)
        for form in forms
    ):
        return None
    return Form(BYTES, min(form.group for form in forms), offsets=any(form.offsets for form in forms))


def taken_apart(tensor: QuantTensor) -> Apart:
    """Take a tensor of blocks apart."""
    layout, raw = tensor.layout, tensor.codes
    assert isinstance(layout, Blocks)
    about, row = PROBES[layout.kind], KINDS[layout.kind].row
    form, shift = about.form, np.float32(about.shift)

    def decoded(patches: Patches, whole_rows: bool = False) -> FloatArray:
        made = np.array(raw)
        blocks = made[:, row:].reshape(len(raw), -1, KINDS[layout.kind].nbytes)
        for start, stop, *words in patches:
            pattern, mask = (
                np.resize(np.frombuffer(bytes.fromhex(word), np.uint8), stop - start)
                for word in (*words, "00")[:2]
            )
            blocks[..., start:stop] = (blocks[..., start:stop] & mask) | pattern
        made[:, row:] = blocks.reshape(len(raw), -1)
        if whole_rows and row:
            made[:, :row] = (np.arange(row // 4, dtype="<f4") + (row == 4)).view(np.uint8)
        return layout.dequantize(layout.tensor(made))

    codes = torch.from_numpy(decoded(about.scales, whole_rows=True) * np.float32(about.times) - shift)
    if form.table and not about.table:
        table = np.zeros((len(raw), 16), np.float32)
        table[:, : row // 4] = np.ascontiguousarray(raw[:, :row]).view("<f4")
        return Apart(form, codes.to(PAIRS), torch.ones(len(raw), 1), table=torch.from_numpy(table))
    scales = decoded(about.ones)[:, :: form.group or raw.shape[1]]
    if form.table:
        equal = decoded((*about.scales, *about.ones))[:, :: form.group] * np.float32(about.times)
        numbers = torch.tensor(about.table + (0.0,) * (16 - len(about.table)))
        codes = torch.searchsorted(numbers[: len(about.table)], codes)
        return Apart(
            form, codes.to(PAIRS), torch.from_numpy(scales / equal), table=numbers.repeat(len(raw), 1)
        )
    offsets = None
    if form.offsets:
        offsets = torch.from_numpy(-decoded(about.zeros)[:, :: form.group] - shift * scales)
    if form.e2m1:
        codes = (codes[..., None] == E2M1_TWICE).to(torch.uint8).argmax(-1)
    return Apart(form, codes.to(form.number), torch.from_numpy(np.array(scales)), offsets)
