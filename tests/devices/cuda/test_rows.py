"""Kernels of rows in the interpreter: norms, rope and stores, tables, elements, reductions. Values and bits."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

import torch

from quire.devices.cuda.jit import InterpretedLauncher
from quire.devices.cuda.kernels import elementwise, norm, relative, rope_store, rows
from quire.devices.cuda.kernels.attention import LayerCache
from quire.devices.cuda.kernels.norm import NormTensors
from quire.devices.elementwise import (
    GELU,
    XIELU,
    Clamp,
    ColumnScale,
    Elementwise,
    SparseGELU,
    Temperature,
)
from quire.devices.sparse_ops import PositionScale
from quire.devices.stream_ops import StreamGates
from quire.errors import EngineError
from tests.devices.cuda.paged import held

RUN = InterpretedLauncher()
CLOSE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 4e-6}
ACTS = list(CLOSE)


def drawn(*shape: int, dtype: Any = torch.float32, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 7 * sum(shape))).to(dtype)


def poison(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.full(shape, torch.nan).to(dtype)


def near(out: Any, wanted: Any) -> bool:
    close = CLOSE.get(out.dtype, 1e-6)
    return torch.allclose(
        out.double(), wanted.double(), rtol=close, atol=close * max(1.0, float(wanted.abs().max()))
    )


def normed(x: Any, kind: str, weight: Any, bias: Any, eps: float) -> Any:
    x = x.double()
    x = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight.double()
    return y if bias is None else y + bias


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize(("kind", "groups"), [("rms", 1), ("layer", 1), ("rms", 3)])
def test_norms(act: Any, kind: str, groups: int) -> None:
    x, weight, bias = drawn(4, 90, dtype=act), drawn(90), drawn(90, seed=1) if kind == "layer" else None
    out = poison(4, 90, dtype=act)
    by = NormTensors(kind, weight, bias, 1e-5)
    norm.normalize(RUN, x, out, by, groups)
    wanted = normed(x.reshape(4, groups, -1), kind, weight.reshape(groups, -1), None, 1e-5).reshape(4, 90)
    assert near(out, wanted if bias is None else wanted + bias)
    alone = poison(1, 90, dtype=act)
    norm.normalize(RUN, x[2:3], alone, by, groups)
    assert torch.equal(alone[0], out[2])


def test_match_rms() -> None:
    x, like, out = drawn(3, 4 * 20), drawn(3, 20), poison(3, 4 * 20)
    norm.match_rms(RUN, x, like, out, 1e-6)
    parts = x.reshape(3, 4, 20).double()
    wanted = like.double().square().mean(1)[:, None, None].sqrt()
    assert near(out, (parts * wanted / parts.square().mean(2, keepdim=True).sqrt()).reshape(3, -1))


def test_angles() -> None:
    positions, inverse = torch.tensor([0, 3, 131_071], dtype=torch.int32), torch.rand(12) + 1e-3
    out = poison(3, 24)
    rope_store.angles(RUN, positions, inverse, 1.25, out)
    turned = (positions.float()[:, None] * inverse).double()
    assert torch.equal(out, (torch.cat([turned.cos(), turned.sin()], 1) * 1.25).float())


def turn(x: Any, angles: Any) -> Any:
    """Rope of heads [T, N, H] in float64."""
    half = angles.shape[1] // 2
    cos, sin = (part[:, None].double() for part in (angles[:, :half], angles[:, half:]))
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def prepared(x: Any, angles: Any, norm: NormTensors | None) -> Any:
    """Norm and rope of heads [T, N, H], in the norm's order."""
    x = x.double()

    def own(x: Any) -> Any:
        if norm is None:
            return x
        if norm.weight.ndim == 1 and norm.weight.numel() == x.shape[1] * x.shape[2]:
            return normed(x.flatten(1), norm.kind, norm.weight, norm.bias, norm.eps).reshape(x.shape)
        return normed(x, norm.kind, norm.weight, norm.bias, norm.eps)

    x = x if norm is not None and norm.after_rope else own(x)
    x = x if angles is None else turn(x, angles)
    return own(x) if norm is not None and norm.after_rope else x


def some_norm(name: str, heads: int, width: int) -> NormTensors | None:
    shapes = {
        "shared": (width,),
        "by head": (heads, width),
        "together": (heads * width,),
        "after": (heads, width),
    }
    if name not in shapes:
        return None
    weight = drawn(*shapes[name], seed=heads)
    bias = drawn(*shapes[name], seed=9) if name == "shared" else None
    return NormTensors("layer" if name == "shared" else "rms", weight, bias, 1e-5, name == "after")


NORMS = [("", "", ""), ("shared", "by head", "by head"), ("together",) * 3, ("after", "after", "")]


@pytest.mark.parametrize(
    "kept", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
)
@pytest.mark.parametrize("names", NORMS)
def test_keys_and_values_are_stored_as_the_cache_holds_them(kept: Any, names: tuple[str, str, str]) -> None:
    heads, groups, width, rotary, block, act = 3, 2, 24, 16, 16, torch.float32
    norms = [
        some_norm(name, count, width) for name, count in zip(names, (heads, groups, groups), strict=True)
    ]
    qkv, angles = drawn(4, (heads + 2 * groups) * width, dtype=act), drawn(4, rotary)
    turns = None if names[0] == "" else angles
    places, out = torch.tensor([35, 2, 60, 17]), poison(4, heads * width, dtype=act)
    sides = [torch.full((4, groups, block, width), 3.0).to(kept) for _ in range(2)]
    fixed = kept.itemsize == 1 and kept != torch.int8
    scales = [torch.rand(groups) + 0.5 if fixed else poison(4, groups, block) for _ in range(2)]
    cache = LayerCache(*sides, *(scales if kept.itemsize == 1 else (None, None)))
    rope_store.store_kv(RUN, qkv, out, cache, places, heads, turns, *norms)
    q, k, v = qkv.reshape(4, -1, width).split([heads, groups, groups], 1)
    assert near(out.reshape(4, heads, width), prepared(q, turns, norms[0]))
    wanted = prepared(k, turns, norms[1]), prepared(v, None, norms[2])
    for side, own, x in zip(sides, scales, wanted, strict=True):
        codes = side[places // block, :, places % block].double()
        if kept == torch.int8:
            codes, x = codes * own[places // block, :, places % block, None], held(x.float(), kept)
            assert torch.allclose(codes, x, atol=0.03)
        elif fixed:
            assert torch.allclose(codes, (x / own[:, None]).float().to(kept).double(), rtol=0.13, atol=1e-2)
        else:
            assert torch.allclose(codes, x, rtol=1e-2 if kept == torch.bfloat16 else 1e-5, atol=1e-5)
    untouched = torch.ones(4 * block, dtype=torch.bool).index_fill(0, places, False).reshape(4, block)
    assert (sides[0].float().permute(0, 2, 1, 3)[untouched] == 3.0).all()
    alone = poison(1, heads * width, dtype=act)
    rope_store.store_kv(
        RUN, qkv[1:2], alone, cache, places[1:2], heads, None if turns is None else turns[1:2], *norms
    )
    assert torch.equal(alone[0], out[1])


def test_queries_of_layers_that_store_nothing() -> None:
    q, angles, out = (
        drawn(3, 2 * 32, dtype=torch.bfloat16),
        drawn(3, 32),
        poison(3, 2 * 32, dtype=torch.bfloat16),
    )
    norm = NormTensors("rms", drawn(32), None, 1e-6)
    rope_store.prepare_queries(RUN, q, out, 2, angles, norm)
    assert near(out, prepared(q.reshape(3, 2, 32), angles, norm).reshape(3, -1))


def test_latents_are_stored() -> None:
    heads, latent, rotary = 3, 40, 8
    kv, q_latent, q_rope = drawn(4, latent + rotary), drawn(4, heads * latent), drawn(4, heads * rotary)
    angles, places, out = drawn(4, rotary), torch.tensor([1, 40, 33, 8]), poison(4, heads * (latent + rotary))
    keys = poison(3, 1, 16, latent + rotary)
    norm = NormTensors("rms", drawn(latent), None, 1e-6)
    rope_store.store_latent(RUN, kv, q_latent, q_rope, out, LayerCache(keys, None), places, angles, norm)
    last = turn(kv[:, None, latent:].double(), angles)[:, 0]
    key = torch.cat([normed(kv[:, :latent], "rms", norm.weight, None, 1e-6), last], 1)
    assert near(keys[places // 16, 0, places % 16], key)
    turned = turn(q_rope.reshape(4, heads, rotary).double(), angles)
    assert near(out, torch.cat([q_latent.reshape(4, heads, latent).double(), turned], 2).reshape(4, -1))


def test_tables_and_chosen_rows() -> None:
    table, ids = drawn(50, 40, dtype=torch.bfloat16), torch.tensor([3, 49, 0, 3], dtype=torch.int32)
    out, moved = poison(4, 40, dtype=torch.bfloat16), poison(2, 40)
    rows.embed(RUN, table, ids, out, 2.5)
    assert torch.equal(out, (table[ids.long()].float() * 2.5).to(torch.bfloat16))
    rows.embed(RUN, table.float(), ids[2:], moved, offset=4)
    assert torch.equal(moved, table[[4, 7]].float())
    rows.select(RUN, table, ids, out)
    assert torch.equal(out, table[ids.long()])


@pytest.mark.parametrize("act", ACTS)
def test_elements(act: Any) -> None:
    x, other, out = drawn(3, 1500, dtype=act), drawn(3, 1500, dtype=act, seed=1), poison(3, 1500, dtype=act)
    wide = x.double()
    elementwise.add(RUN, x, other, out, 0.5)
    assert near(out, wide + 0.5 * other.double())
    elementwise.scale(RUN, x, out, 3.0)
    assert near(out, wide * 3)
    elementwise.scale(RUN, x, out, 3.0, 2.0)
    assert near(out, 2 * torch.tanh(wide * 3 / 2))
    elementwise.multiply(RUN, x, other[:, :3], out)
    assert near(out, (wide.reshape(3, 3, 500) * other[:, :3, None].double()).reshape(3, -1))


def test_functions() -> None:
    x, out, positions = drawn(3, 200), poison(3, 200), torch.tensor([0, 9000, 70000], dtype=torch.int32)
    factors, wide, f = drawn(200), x.double(), XIELU(0.8, 0.6, 0.5, -1e-6)
    below = f.alpha_n * (torch.expm1(wide.clamp(max=f.eps)) - wide)
    apart = wide - wide.mean(1, keepdim=True)
    kept = (apart - 0.5 * apart.square().mean(1, keepdim=True).sqrt()).clamp(min=0)
    scales = 1 + 0.1 * torch.log(1 + ((positions + 1) // 8192).double())
    for function, wanted in (
        (Clamp(0.7), wide.clamp(-0.7, 0.7)),
        (Temperature(0.1, 8192, 1), wide * scales[:, None]),
        (f, torch.where(wide > 0, f.alpha_p * wide * wide, below) + f.beta * wide),
        (GELU(), torch.nn.functional.gelu(wide)),
        (ColumnScale(tuple(factors.tolist())), wide * factors.double()),
        (SparseGELU(0.5), torch.nn.functional.gelu(kept, approximate="tanh")),
    ):
        out.fill_(torch.nan)
        elementwise.apply(RUN, x, out, function, positions, factors)
        assert near(out, wanted), function
    with pytest.raises(EngineError, match="no function Elementwise"):
        elementwise.apply(RUN, x, out, Elementwise())


def applied(x: Any, function: Elementwise, positions: Any = None) -> Any:
    """A function of rows with numbers of its own; a row alone has the same bits."""
    numbers, out, alone = (
        torch.tensor(elementwise.numbers_of(function)),
        poison(*x.shape),
        poison(1, x.shape[1]),
    )
    elementwise.apply(RUN, x, out, function, positions, numbers)
    elementwise.apply(RUN, x[1:2], alone, function, None if positions is None else positions[1:], numbers)
    assert torch.equal(alone[0], out[1])
    return out


def test_scales_by_position() -> None:
    x, positions = drawn(3, 12), torch.tensor([0, 77, 99_999], dtype=torch.int32)
    function = PositionScale(3, (0.1, 0.0, -0.2), (1.0, 0.5, 2.0))
    scales = torch.log1p(positions.double())[:, None] * torch.tensor(function.growths) + torch.tensor(
        function.bases
    )
    assert near(applied(x, function, positions), x.double() * scales.repeat_interleave(4, 1))


@pytest.mark.parametrize("streams", [1, 2, 3, 4])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_streams_get_their_gates(streams: int, parts: int) -> None:
    n = streams
    width = n * parts if parts < 3 else n * (n + 2)
    x, factors, biases = 4 * drawn(3, width), drawn(width), drawn(width, seed=1)
    function = StreamGates(n, 4, 1e-3, 1.75, 0.25, tuple(factors.tolist()), tuple(biases.tolist()))
    found, made = applied(x, function), x.double() * factors + biases
    assert near(found[:, :n], made[:, :n].sigmoid() + 1e-3)
    if parts > 1:
        assert near(found[:, n : 2 * n], 1.75 * made[:, n : 2 * n].sigmoid() + 0.25)
    if parts > 2:
        mixed = made[:, 2 * n :].reshape(3, n, n).softmax(2) + 1e-3
        for i in range(7):
            mixed = mixed / (mixed.sum(2 if i % 2 else 1, keepdim=True) + 1e-3)
        assert near(found[:, 2 * n :], mixed.transpose(1, 2).reshape(3, -1))


def test_parts_are_compared() -> None:
    x, other, out, alone = drawn(3, 4 * 30), drawn(3, 4 * 30, seed=1), poison(3, 4), poison(1, 4)
    x[0, :30] = 0.0
    elementwise.compare_parts(RUN, x, other, out, 0.3, 1e-3)
    elementwise.compare_parts(RUN, x[1:2], other[1:2], alone, 0.3, 1e-3)
    z = (x * other.double()).reshape(3, 4, 30).sum(2) * 0.3
    assert near(out, (z.sign() * z.abs().clamp(min=1e-3).sqrt()).sigmoid())
    assert torch.equal(alone[0], out[1])


@pytest.mark.parametrize("sides", ["both", "by query", "by key"])
def test_distances_add_to_scores(sides: str) -> None:
    bounds, heads, most, buckets, span = [0, 5, 6, 13], 2, 9, 6, 64
    places = torch.randint(0, buckets, (2 * most - 1,), generator=torch.Generator().manual_seed(1)).int()
    of_query, of_key = (drawn(13, heads * buckets, seed=seed) for seed in (1, 2))
    by_query, by_key = (None if sides == "by key" else of_query), (None if sides == "by query" else of_key)
    out = poison(13, heads * span)
    relative.relative_scores(
        RUN, by_query, by_key, places, torch.tensor(bounds, dtype=torch.int32), out, heads, 0.3
    )
    wanted = torch.zeros(13, heads, span)
    for start, stop in pairwise(bounds):
        for i, head, j in product(range(stop - start), range(heads), range(stop - start)):
            place = head * buckets + int(places[j - i + most - 1])
            added = 0.0 if by_query is None else float(by_query[start + i, place])
            added += 0.0 if by_key is None else float(by_key[start + j, place])
            wanted[start + i, head, j] = 0.3 * added
    assert near(out, wanted.reshape(13, -1))


@pytest.mark.parametrize("shared", [True, False])
def test_combinations_of_parts(shared: bool) -> None:
    x, factors, residual, out = (
        drawn(3, 4 * 30),
        drawn(1 if shared else 3, 2 * 4),
        drawn(3, 2 * 30),
        poison(3, 60),
    )
    factors[:, 1] = factors[:, 5] = 0.0
    x[:, 30:60] = torch.nan  # parts whose factor is 0 are left out
    elementwise.combine(RUN, x, factors, out, 4, residual)
    parts = x.nan_to_num().reshape(3, 4, 30).double()
    wanted = torch.einsum("tba,tad->tbd", factors.expand(3, 8).reshape(3, 2, 4).double(), parts)
    assert near(out, wanted.reshape(3, 60) + residual)
