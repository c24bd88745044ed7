"""Queries, keys and values between the projection and attention: norms, rope, and the cache. One launch each."""

from __future__ import annotations

from typing import Any

import torch

from quire.devices.cuda.kernels.attention import LayerCache
from quire.devices.cuda.kernels.norm import NONE, NormTensors, root_mean_square
from quire.devices.cuda.language import tl, triton
from quire.devices.cuda.launch import Launch, Launcher, launch
from quire.devices.cuda.tiles import Shape
from quire.devices.kv import FP8_MOST
from quire.errors import EngineError

MOST = {torch.float8_e4m3fn: FP8_MOST["fp8_e4m3"], torch.float8_e5m2: FP8_MOST["fp8_e5m2"]}
SHARED, BY_HEAD, TOGETHER = 1, 2, 3  # weights of a norm: one for all heads, one each, all heads as one row


@triton.jit
def turned_angles(positions, inv_freq, out, scale, offset, HALF: tl.constexpr, BLOCK: tl.constexpr):
    token, i = tl.program_id(0), tl.arange(0, BLOCK)
    inside, row = i < HALF, out + token.to(tl.int64) * 2 * HALF + i
    position = (tl.load(positions + token) + offset).to(tl.float32)
    cos, sin = turns(position * tl.load(inv_freq + i, mask=inside, other=0.0))
    tl.store(row, (cos * scale).to(tl.float32), mask=inside)
    tl.store(row + HALF, (sin * scale).to(tl.float32), mask=inside)


@triton.jit
def turns(angle):
    """The cosine and the sine of float32 angles below 2^31, float64: Taylor's series of what is left of quarters."""
    wide = angle.to(tl.float64)
    quarters = (
        wide * 0.63661977236758134 + 6755399441055744.0
    ) - 6755399441055744.0  # to the nearest integer
    # pi / 2 as a sum of three numbers. Products with the first two, of 22 bits each, are exact.
    x = (
        wide
        - quarters * 1.570796012878418
        - quarters * 3.139164164167596e-07
        - quarters * 6.223372171896613e-14
    )
    z, number = x * x, quarters.to(tl.int64)
    cos, sin = z * 0.0 + 1.0, z * 0.0 + 1.0
    for i in tl.static_range(8):
        cos = 1.0 - cos * z * (1.0 / ((16 - 2 * i) * (15 - 2 * i)))
        sin = 1.0 - sin * z * (1.0 / ((17 - 2 * i) * (16 - 2 * i)))
    sin *= x
    turned, lower = (number & 1) == 1, (number & 2) == 2
    cos, sin = tl.where(turned, -sin, cos), tl.where(turned, cos, sin)
    return tl.where(lower, -cos, cos), tl.where(lower, -sin, sin)


@triton.jit
def rotated(v, partner, angles, d, HALF: tl.constexpr):
    """Rope: elements i and i + HALF turn as a pair."""
    turns = d < 2 * HALF
    cos = tl.load(angles + d % HALF, mask=turns, other=1.0)
    sin = tl.load(angles + HALF + d % HALF, mask=turns, other=0.0)
    return tl.where(turns, v * cos + tl.where(d < HALF, -partner, partner) * sin, v)


@triton.jit
def normed(v, mean, root, weight, bias, place, inside):
    y = tl.div_rn(v - mean, root) * tl.load(weight + place, mask=inside, other=0.0)
    if bias is not None:
        y += tl.load(bias + place, mask=inside, other=0.0)
    return tl.where(inside, y, 0.0)


@triton.jit
def prepared(x, head, angles, weight, bias, eps, H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
             HEADS: tl.constexpr, KIND: tl.constexpr, LAYER: tl.constexpr, AFTER: tl.constexpr):  # fmt: skip
    """One head of the heads at x, normed and rotated."""
    d = tl.arange(0, D)
    inside, first = d < H, 0
    if KIND > 1:
        first = head * H
    v = tl.load(x + head * H + d, mask=inside, other=0.0).to(tl.float32)
    other = d
    if HALF > 0:
        other = tl.where(d < HALF, d + HALF, d - HALF)
        partner = tl.load(x + head * H + other, mask=d < 2 * HALF, other=0.0).to(tl.float32)
    if KIND > 0 and not AFTER:
        every, count = v, H
        if KIND == 3:
            width: tl.constexpr = HEADS * H
            at = tl.arange(0, triton.next_power_of_2(width))
            every, count = tl.load(x + at, mask=at < width, other=0.0).to(tl.float32), width
        mean = 0.0
        if LAYER:
            mean = tl.sum(every, 0) / count
            at = tl.arange(0, every.shape[0])
            every = tl.where(at < count, every - mean, 0.0)
        root = root_mean_square(every, count, eps)
        v = normed(v, mean, root, weight, bias, first + d, inside)
        if HALF > 0:
            partner = normed(partner, mean, root, weight, bias, first + other, d < 2 * HALF)
    if HALF > 0:
        v = rotated(v, partner, angles, d, HALF)
    if KIND > 0 and AFTER:
        mean = 0.0
        if LAYER:
            mean = tl.sum(v, 0) / H
        apart = tl.where(inside, v - mean, 0.0)
        v = normed(v, mean, root_mean_square(apart, H, eps), weight, bias, first + d, inside)
    return v


@triton.jit
def keep(v, side, scales, place, group, d, G: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr,
         BY_TOKEN: tl.constexpr):  # fmt: skip
    """Store a key or a value of a group in its place, as the cache's type holds it."""
    slot = (place // BLOCK * G + group) * BLOCK + place % BLOCK
    if BY_TOKEN:
        most = tl.max(tl.abs(v), 0)
        inverse = tl.where(most >= 1e-30, tl.div_rn(127.0, tl.maximum(most, 1e-30)), 0.0)
        v = (v * inverse + 12582912.0) - 12582912.0  # to the nearest integer
        tl.store(scales + slot, tl.div_rn(most, 127.0))
    elif MOST > 0:
        v = tl.minimum(tl.maximum(tl.div_rn(v, tl.load(scales + group)), -MOST), MOST)
    tl.store(side + slot * H + d, v.to(side.dtype.element_ty), mask=d < H)


@triton.jit
def rope_store(
    qkv, out, keys, values, key_scales, value_scales, places, angles, q_weight, q_bias, k_weight, k_bias, v_weight,
    v_bias, q_eps, k_eps, v_eps, stride,
    N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    MOST: tl.constexpr, BY_TOKEN: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    Q_LAYER: tl.constexpr, K_LAYER: tl.constexpr, V_LAYER: tl.constexpr, Q_AFTER: tl.constexpr, K_AFTER: tl.constexpr,
):  # fmt: skip
    """One head of one token: of q, k or v."""
    token, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, D)
    x = qkv + token * stride
    turn = None if HALF == 0 else angles + token * 2 * HALF
    if head < N:
        v = prepared(x, head, turn, q_weight, q_bias, q_eps, H, D, HALF, N, Q, Q_LAYER, Q_AFTER)
        tl.store(out + (token * N + head) * H + d, v.to(out.dtype.element_ty), mask=d < H)
    elif head < N + G:
        v = prepared(x + N * H, head - N, turn, k_weight, k_bias, k_eps, H, D, HALF, G, K, K_LAYER, K_AFTER)
        keep(v, keys, key_scales, tl.load(places + token), head - N, d, G, H, BLOCK, MOST, BY_TOKEN)
    elif G > 0:
        x += (N + G) * H
        v = prepared(x, head - N - G, None, v_weight, v_bias, v_eps, H, D, 0, G, V, V_LAYER, False)
        keep(v, values, value_scales, tl.load(places + token), head - N - G, d, G, H, BLOCK, MOST, BY_TOKEN)


@triton.jit
def latent_store(kv, q_latent, q_rope, out, keys, key_scales, places, angles, weight, bias, eps, kv_stride,
                 N: tl.constexpr, C: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
                 LAYER: tl.constexpr, MOST: tl.constexpr, BY_TOKEN: tl.constexpr):  # fmt: skip
    """One head of queries, or the key if there is one, of latent attention: the latent, then what rotates."""
    token, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, D)
    turns, at = (d >= C) & (d < C + R), d - C
    other = tl.where(at < R // 2, at + R // 2, at - R // 2)
    turn = angles + token * R
    cos = tl.load(turn + at % (R // 2), mask=turns, other=1.0)
    sin = tl.load(turn + R // 2 + at % (R // 2), mask=turns, other=0.0)
    if kv is None or head < N:
        v = tl.load(q_latent + (token * N + head) * C + d, mask=d < C, other=0.0).to(tl.float32)
        row = q_rope + (token * N + head) * R
    else:
        v = tl.load(kv + token * kv_stride + d, mask=d < C, other=0.0).to(tl.float32)
        mean = 0.0
        if LAYER:
            mean = tl.sum(v, 0) / C
        root = root_mean_square(tl.where(d < C, v - mean, 0.0), C, eps)
        v = normed(v, mean, root, weight, bias, d, d < C)
        row = kv + token * kv_stride + C
    own = tl.load(row + at, mask=turns, other=0.0).to(tl.float32)
    partner = tl.load(row + other, mask=turns, other=0.0).to(tl.float32)
    v = tl.where(turns, own * cos + tl.where(at < R // 2, -partner, partner) * sin, v)
    if kv is None or head < N:
        tl.store(out + (token * N + head) * (C + R) + d, v.to(out.dtype.element_ty), mask=d < C + R)
    else:
        keep(v, keys, key_scales, tl.load(places + token), 0, d, 1, C + R, BLOCK, MOST, BY_TOKEN)


def angles(run: Launcher, positions: Any, inv_freq: Any, scale: float, out: Any, offset: int = 0) -> None:
    """Cosines, then sines, of positions [T] + offset times frequencies [R / 2]: float32 [T, R]."""
    half = inv_freq.shape[0]
    launch(
        run, turned_angles, (positions.shape[0], 1, 1), positions, inv_freq, out, float(scale), offset,
        HALF=half, BLOCK=triton.next_power_of_2(half), shape=Shape(1, 1),
    )  # fmt: skip


def store_kv(
    run: Launcher,
    qkv: Any,
    out: Any,
    cache: LayerCache | None,
    places: Any,
    num_heads: int,
    angles: Any = None,
    q_norm: NormTensors | None = None,
    k_norm: NormTensors | None = None,
    v_norm: NormTensors | None = None,
) -> None:
    """Norm and rotate qkv [T, (N + 2 G) H]: q to `out` [T, N H], keys and values to their places [T] in the cache.

    A cache without values takes keys alone: qkv is [T, (N + G) H].
    """
    width = out.shape[1] // num_heads if cache is None else cache.keys.shape[3]
    groups = 0 if cache is None else cache.keys.shape[1]
    sides = 1 if cache is not None and cache.values is None else 2
    args: dict[str, Any] = {
        "qkv": qkv,
        "out": out,
        "places": places,
        "angles": angles,
        "stride": qkv.stride(0),
    }
    constants: dict[str, Any] = {"N": num_heads, "G": groups, "H": width, **kept_as(cache)}
    constants |= {"D": triton.next_power_of_2(width), "HALF": 0 if angles is None else angles.shape[1] // 2}
    for side in ("keys", "values", "key_scales", "value_scales"):
        args[side] = None if cache is None else getattr(cache, side)
    for name, norm, heads in (("q", q_norm, num_heads), ("k", k_norm, groups), ("v", v_norm, groups)):
        args |= {
            f"{name}_weight": None,
            f"{name}_bias": None,
            f"{name}_eps": 0.0 if norm is None else norm.eps,
        }
        constants |= {name.upper(): 0, f"{name.upper()}_LAYER": False, f"{name.upper()}_AFTER": False}
        if norm is not None:
            args |= {f"{name}_weight": norm.weight, f"{name}_bias": norm.bias}
            constants[name.upper()] = _kind(norm, heads, width)
            constants[f"{name.upper()}_LAYER"] = norm.kind == "layer"
            constants[f"{name.upper()}_AFTER"] = norm.after_rope
    del constants["V_AFTER"]  # values do not turn
    run(Launch(rope_store, (qkv.shape[0], num_heads + sides * groups, 1), args, constants, Shape(1, 1)))


def prepare_queries(
    run: Launcher, q: Any, out: Any, num_heads: int, angles: Any = None, norm: NormTensors | None = None
) -> None:
    """Norm and rotate queries [T, N H] of a layer that stores no keys."""
    store_kv(run, q, out, None, None, num_heads, angles, norm)


def store_latent(
    run: Launcher,
    kv: Any,
    q_latent: Any,
    q_rope: Any,
    out: Any,
    cache: LayerCache,
    places: Any,
    angles: Any,
    norm: NormTensors | None,
) -> None:
    """Norm and rotate kv [T, C + R] into the cache; q_latent [T, N C] and q_rope [T, N R] make `out` [T, N (C + R)].

    Without kv nothing is stored.
    """
    rotary = angles.shape[1]
    num_heads = q_rope.shape[1] // rotary
    latent, norm = q_latent.shape[1] // num_heads, norm or NONE
    launch(
        run, latent_store, (q_rope.shape[0], num_heads + (kv is not None), 1), kv, q_latent, q_rope, out, cache.keys,
        cache.key_scales, places, angles, norm.weight, norm.bias, norm.eps, 0 if kv is None else kv.stride(0),
        N=num_heads, C=latent, R=rotary, D=triton.next_power_of_2(latent + rotary), LAYER=norm.kind == "layer",
        shape=Shape(4, 1), **kept_as(cache),
    )  # fmt: skip


def _kind(norm: NormTensors, heads: int, width: int) -> int:
    """Tell how many heads share the weight of a norm."""
    if norm.weight.ndim == 2:
        return BY_HEAD
    if norm.weight.shape[0] == width and heads != 1:
        return SHARED
    if norm.after_rope and heads != 1:
        raise EngineError("a norm of all heads together comes before the rope on this device")
    return TOGETHER if heads != 1 else SHARED


def kept_as(cache: LayerCache | None) -> dict[str, Any]:
    """The constants by which a cache's type is stored."""
    if cache is None:
        return {"BLOCK": 1, "MOST": 0.0, "BY_TOKEN": False}
    kept = cache.keys.dtype
    return {"BLOCK": cache.keys.shape[2], "MOST": MOST.get(kept, 0.0), "BY_TOKEN": kept == torch.int8}
