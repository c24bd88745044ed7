"""The interpreter computes what types of few bits give, and leaves Triton as it was."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

import torch
import triton
import triton.language as tl

from quire.devices.cuda.interpreter import interpret

NUMBERS = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32]


@triton.jit
def convert(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@triton.jit
def add(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at) + tl.load(x + at))


@triton.jit
def square(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tile = tl.load(x + at[:, None] * SIZE + at[None, :])
    tl.store(out + at[:, None] * SIZE + at[None, :], tl.dot(tile, tile))


@pytest.mark.parametrize("wanted", NUMBERS)
@pytest.mark.parametrize("given", NUMBERS)
def test_conversions_round_as_torch_does(given: Any, wanted: Any) -> None:
    x = (torch.randn(1024, generator=torch.Generator().manual_seed(1)) * 8).to(given)
    out = torch.empty(1024, dtype=wanted)
    interpret(convert, (1, 1, 1), {"x": x, "out": out}, {"SIZE": 1024})
    assert torch.equal(out.float(), x.float().to(wanted).float())


def test_integers_convert_to_few_bits_and_back() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8)
    kept, back = torch.empty(16, dtype=torch.bfloat16), torch.empty(16, dtype=torch.int32)
    interpret(convert, (1, 1, 1), {"x": codes, "out": kept}, {"SIZE": 16})
    interpret(convert, (1, 1, 1), {"x": kept, "out": back}, {"SIZE": 16})
    assert kept.float().tolist() == back.tolist() == list(range(-8, 8))


@pytest.mark.parametrize("number", [torch.bfloat16, torch.float8_e4m3fn])
def test_arithmetic_on_few_bits_is_an_error(number: Any) -> None:
    x = torch.ones(16).to(number)
    with pytest.raises(TypeError, match="convert them to float32 first"):
        interpret(add, (1, 1, 1), {"x": x, "out": x.clone()}, {"SIZE": 16})


def test_a_product_is_rounded_once() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    out = torch.empty(64, 64)
    interpret(square, (1, 1, 1), {"x": x, "out": out}, {"SIZE": 64})
    assert torch.equal(out, (x.double() @ x.double()).float())


def test_triton_stays_as_it_was() -> None:
    before = vars(tl.core).copy(), vars(tl.tensor).copy(), vars(triton.JITFunction).copy()
    x = torch.ones(16)
    interpret(add, (1, 1, 1), {"x": x, "out": x.clone()}, {"SIZE": 16})
    assert before == (vars(tl.core), vars(tl.tensor), vars(triton.JITFunction))
    with pytest.raises(RuntimeError):
        add(x, x, 16)
