"""Packed weights in the interpreter: values against float64, and rows that follow no number of tokens."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.devices.cuda.jit import InterpretedLauncher
from quire.devices.cuda.kernels import packed
from quire.devices.cuda.kernels.packed import Form, PackedWeight
from quire.devices.cuda.target import TARGETS
from quire.weights.activations import round_int8

RUN = InterpretedLauncher()
# kind, columns in a group (0: all), whether activations are int8
KINDS = [
    ("int8", 0, True), ("int8", 0, False), ("int8", 64, False), ("int4", 32, False), ("int4", 128, True),
    ("int4 with zeros", 64, False), ("int4 with zeros", 64, True), ("fp8", 0, False), ("fp8", 128, False),
    ("e2m1", 32, False), ("e2m1", 16, False), ("int4 with offsets", 32, False), ("int8 with offsets", 16, False),
    ("table", 0, False), ("table", 16, False), ("table", 64, False),
]  # fmt: skip


def drawn(*shape: int, dtype: Any = torch.float32, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 7 * sum(shape))).to(dtype)


def weight_of(kind: str, group: int, rows: int, columns: int, seed: int = 0) -> tuple[PackedWeight, Any]:
    """A packed weight, and its values in float64."""
    draw = torch.Generator().manual_seed(rows + columns + 999 * seed)
    groups = -(-columns // group) if group else 1
    scales = torch.rand(rows, groups, generator=draw) + 0.5
    wide = scales.double().repeat_interleave(group or columns, 1)[:, :columns]
    offsets = torch.randn(rows, groups, generator=draw) if "offsets" in kind else None
    if kind == "fp8":
        codes = torch.randn(rows, columns, generator=draw).to(torch.float8_e4m3fn)
        return PackedWeight.pack(Form(codes.dtype, group), codes, scales), codes.double() * wide
    added = 0.0 if offsets is None else offsets.double().repeat_interleave(group, 1)[:, :columns]
    if kind.startswith("int8"):
        codes = torch.randint(-127, 128, (rows, columns), generator=draw).to(torch.int8)
        form = Form(codes.dtype, group, offsets=offsets is not None)
        return PackedWeight.pack(form, codes, scales, offsets=offsets), codes.double() * wide - added
    codes = torch.randint(0, 16, (rows, columns), generator=draw).to(torch.uint8)
    if kind == "table":
        table = torch.randn(rows, 16, generator=draw)
        weight = PackedWeight.pack(Form(codes.dtype, group, table=True), codes, scales, table=table)
        return weight, table.double().gather(1, codes.long()) * wide
    zeros = torch.randint(0, 16, (rows, groups), generator=draw).to(torch.uint8) if "zeros" in kind else None
    form = Form(codes.dtype, group, "zeros" in kind, "offsets" in kind, kind == "e2m1")
    weight = PackedWeight.pack(form, codes, scales, zeros, offsets)
    if kind == "e2m1":
        steps = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        return weight, torch.where(codes > 7, -1, 1) * steps[codes.long() % 8] * 2 * wide
    less = 8.0 if zeros is None else zeros.double().repeat_interleave(group, 1)[:, :columns]
    return weight, (codes.double() - (0.0 if offsets is not None else less)) * wide - added


def product(
    run: InterpretedLauncher, x: Any, weight: PackedWeight, integer: bool, act: Any, **about: Any
) -> Any:
    rows = weight.codes.shape[0] // (2 if about.get("is_gated") else 1)
    out, scales = torch.full((len(x), rows), torch.nan).to(act), None
    if integer:
        by_head = x.view(len(x) * about.get("heads", 1), -1)
        codes, scales = (
            torch.full(by_head.shape, 77, dtype=torch.int8),
            torch.full((len(by_head),), torch.nan),
        )
        packed.round_rows(run, by_head, codes, scales)
        x = codes.view(x.shape)
    packed.linear(run, x, weight, out, x_scales=scales, **about)
    return out


@pytest.mark.parametrize(("kind", "group", "integer"), KINDS)
@given(st.integers(1, 20), st.integers(1, 140), st.sampled_from([16, 64, 144, 256]), st.booleans())
@settings(max_examples=3)
def test_values(
    kind: str, group: int, integer: bool, tokens: int, rows: int, columns: int, plain: bool
) -> None:
    weight, values = weight_of(kind, group, rows, columns)
    act = torch.float32 if plain else torch.bfloat16
    x = drawn(tokens, columns, dtype=act)
    bias, residual = drawn(rows), drawn(tokens, rows, dtype=act, seed=1)
    out = product(RUN, x, weight, integer, act, bias=bias, activation="relu", residual=residual)
    seen = torch.from_numpy(round_int8(x.float().numpy())).double() if integer else x.double()
    wanted = torch.relu(seen @ values.T + bias) + residual
    close = 2e-6 if plain else 8e-3
    assert torch.allclose(out.double(), wanted, rtol=close, atol=close * float(wanted.abs().max()))


def test_gates() -> None:
    weight, values = weight_of("int4", 64, 60, 128)
    x = drawn(3, 128) / 16
    out = product(RUN, x, weight, False, torch.float32, activation="silu", is_gated=True)
    y = x.double() @ values.T
    assert torch.allclose(
        out.double(), torch.nn.functional.silu(y[:, ::2]) * y[:, 1::2], rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize(("kind", "group", "integer"), KINDS)
def test_heads_are_products_of_their_own(kind: str, group: int, integer: bool) -> None:
    weights = [weight_of(kind, group, 20, 144, seed=head)[0] for head in range(3)]
    x, bias = drawn(5, 3 * 144), drawn(60)
    every = product(RUN, x, packed.joined(weights), integer, torch.float32, bias=bias, heads=3)
    for head, weight in enumerate(weights):
        own, shift = x[:, head * 144 : head * 144 + 144].contiguous(), bias[head * 20 : head * 20 + 20]
        alone = product(RUN, own, weight, integer, torch.float32, bias=shift)
        assert torch.equal(every[:, head * 20 : head * 20 + 20], alone)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize(("kind", "group", "integer"), KINDS)
def test_a_row_follows_no_number_of_tokens(kind: str, group: int, integer: bool, target: str) -> None:
    run, (weight, _) = InterpretedLauncher(TARGETS[target]), weight_of(kind, group, 70, 256)
    x = drawn(70, 256, dtype=torch.bfloat16)
    every = product(run, x, weight, integer, torch.bfloat16)
    assert len({weight.form.tiles(run).of(count) for count in (1, 70)}) == 2
    for rows in ([5], [69, 5], list(range(17))):
        assert torch.equal(product(run, x[rows], weight, integer, torch.bfloat16), every[rows])
