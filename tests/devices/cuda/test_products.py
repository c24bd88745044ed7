"""Products in the interpreter: values against float64, and rows that follow no number of tokens and no tile."""

from __future__ import annotations

from typing import Any, get_args

import pytest

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.devices.cuda.jit import InterpretedLauncher
from quire.devices.cuda.kernels import products
from quire.devices.cuda.target import TARGETS
from quire.devices.operands import Activation
from quire.devices.torch.cache import activate

RUN = InterpretedLauncher()
ROUNDED = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-6}
ACTIVATIONS = [kind for kind in get_args(Activation) if not kind.startswith("clamped")]


def drawn(*shape: int, dtype: Any = torch.float32, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def poison(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.full(shape, torch.nan).to(dtype)


def near(out: Any, wanted: Any) -> bool:
    close = ROUNDED[out.dtype]
    return torch.allclose(out.double(), wanted.double(), rtol=close, atol=close * float(wanted.abs().max()))


@pytest.mark.parametrize("dtype", ROUNDED)
@given(st.integers(1, 40), st.integers(1, 150), st.sampled_from([16, 48, 128, 272]), st.booleans())
@settings(max_examples=4)
def test_values(dtype: Any, tokens: int, rows: int, columns: int, plain: bool) -> None:
    x, weight = drawn(tokens, columns, dtype=dtype), drawn(rows, columns, dtype=dtype)
    bias = None if plain else drawn(rows)
    residual = None if plain else drawn(tokens, rows, dtype=dtype, seed=1)
    out = poison(tokens, rows, dtype=dtype)
    products.linear(RUN, x, weight, out, bias, None if plain else "relu", residual)
    y = x.double() @ weight.double().T
    if bias is not None and residual is not None:
        y = torch.relu(y + bias) + residual
    assert near(out, y)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations(kind: Activation) -> None:
    x, weight, out = drawn(3, 64) * 4, drawn(32, 64) / 8, poison(3, 32)
    products.linear(RUN, x, weight, out, activation=kind)
    assert near(out, activate(kind, x.double() @ weight.double().T))


@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        ("silu", 0.0),
        ("gelu_tanh", 0.0),
        ("silu", 1.5),
        ("clamped_swiglu", 0.0),
        ("clamped_swiglu", 2.0),
        ("clamped_silu", 0.0),
        ("clamped_silu", 2.0),
    ],
)
def test_gates(kind: Activation, limit: float) -> None:
    x, gate, up = drawn(5, 64) * 4, drawn(70, 64) / 4, drawn(70, 64, seed=1) / 4
    bias = drawn(2, 70)
    out = poison(5, 70)
    weight = torch.stack([gate, up], 1).reshape(140, 64)
    products.gated(RUN, x, weight, out, kind, bias.T.reshape(-1).contiguous(), limit)
    a, b = x.double() @ gate.double().T + bias[0], x.double() @ up.double().T + bias[1]
    if kind == "clamped_swiglu":
        low, bound = a.clamp(max=limit or 7.0), limit or 7.0
        wanted = low * torch.sigmoid(1.702 * low) * (b.clamp(-bound, bound) + 1.0)
    elif kind == "clamped_silu":
        bound = limit or torch.inf
        wanted = activate("silu", a.clamp(max=bound)) * b.clamp(-bound, bound)
    elif limit:
        wanted = activate(kind, a).clamp(max=limit) * b.clamp(-limit, limit)
    else:
        wanted = activate(kind, a) * b
    assert near(out, wanted)


def test_heads_and_views_and_float32_results() -> None:
    x = drawn(3, 4 * 32 + 16, dtype=torch.bfloat16)[:, : 4 * 32]
    weights, out = drawn(4, 20, 32, dtype=torch.bfloat16), poison(3, 4 * 20)
    products.heads(RUN, x, weights, out)
    wanted = torch.einsum("tnk,nok->tno", x.reshape(3, 4, 32).double(), weights.double()).reshape(3, -1)
    assert torch.allclose(out.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", ROUNDED)
def test_a_row_follows_no_number_of_tokens(target: str, dtype: Any) -> None:
    """Each size class has its own tile; all of them sum in one order."""
    run = InterpretedLauncher(TARGETS[target])
    tokens, most = (70, 33) if dtype == torch.float32 else (140, 65)
    x, weight = drawn(tokens, 272, dtype=dtype), drawn(70, 272, dtype=dtype)

    def rows(*picked: int) -> Any:
        out = poison(len(picked), 70)
        products.linear(run, x[list(picked)], weight, out)
        return out

    every = rows(*range(most))
    assert len({products.product_tiles(run, dtype).of(count) for count in (1, 17, most)}) > 1
    for picked in ([5], [9, 5], range(17), [most - 1]):
        assert torch.equal(rows(*picked), every[list(picked)])


def test_padding_rows_stay_apart() -> None:
    x, weight = drawn(9, 64, dtype=torch.bfloat16), drawn(40, 64, dtype=torch.bfloat16)
    alone, beside = poison(4, 40), poison(9, 40)
    products.linear(RUN, x[:4].clone(), weight, alone)
    x[4:] = torch.nan
    products.linear(RUN, x, weight, beside)
    assert torch.equal(alone, beside[:4])
