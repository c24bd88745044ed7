"""Rotary frequencies of each RopeSpec kind. Knows no config spelling and no backend."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.devices.protocol import Rope
from quire.model.spec import RopeSpec

Frequencies = NDArray[np.float64]


def make_rope(spec: RopeSpec) -> Rope:
    """Frequencies in float64, rounded once to float32: [rotary_dim / 2], and the scale of cos and sin."""
    pairs: NDArray[Any] = np.arange(0, spec.rotary_dim, 2, dtype=np.float64)
    plain: Frequencies = spec.theta ** (-pairs / (spec.share or spec.rotary_dim))
    scale = 1.0
    if spec.kind == "linear":
        plain = plain / spec.factor
    elif spec.kind == "proportional":
        plain = np.where(np.arange(len(plain)) < spec.rotated_pairs, plain / spec.factor, 0.0)
    elif spec.kind == "llama3":
        plain = _llama3(spec, plain)
    elif spec.kind == "yarn":
        plain, scale = _yarn(spec, plain), _yarn_scale(spec)
    elif spec.kind == "longrope":
        plain, scale = plain / np.array(spec.factors), _longrope_scale(spec)
    return Rope((-plain if spec.backwards else plain).astype(np.float32), scale)


def _llama3(spec: RopeSpec, plain: Frequencies) -> Frequencies:
    """Llama 3.1: short wavelengths stay, long ones are divided by factor, and those in between are blended.

    Grattafiori et al. 2024, arXiv:2407.21783; the bands are those of Meta's released code.
    """
    turns = spec.original_max_position * plain / (2 * math.pi)  # of each pair, over the trained context
    blend = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return np.asarray((1 - blend) * plain / spec.factor + blend * plain)


def _yarn(spec: RopeSpec, plain: Frequencies) -> Frequencies:
    """YaRN's "NTK by parts": keep fast pairs, interpolate slow ones, with a ramp in between.

    Peng et al. 2023, arXiv:2309.00071, section 3.2.
    """

    def pair_with(turns: float) -> float:
        wavelength = spec.original_max_position / (turns * 2 * math.pi)
        return spec.rotary_dim * math.log(wavelength) / (2 * math.log(spec.theta))

    low, high = pair_with(spec.beta_fast), pair_with(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    width = high - low or 0.001
    slow = np.clip((np.arange(spec.rotary_dim // 2) - low) / width, 0.0, 1.0)
    return np.asarray(plain / spec.factor * slow + plain * (1 - slow))


def _longrope_scale(spec: RopeSpec) -> float:
    """LongRoPE's attention temperature as a scale of cos and sin, unless the config gives its own."""
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(spec.factor) / math.log(spec.original_max_position))


def sinusoids(positions: int, width: int, steps: int) -> NDArray[np.float32]:
    """Sines, then cosines, of positions by frequencies that fall to 1 / 10000 over `steps`: [positions, width].

    Vaswani et al. 2017, arXiv:1706.03762, section 3.5.
    """
    frequencies = (10000.0 ** (-np.arange(width // 2) / steps)).astype(np.float32)
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


BUCKETED_DISTANCE = 128


def position_buckets(buckets: int) -> NDArray[np.int64]:
    """The bucket of each distance from -128 to 128 from a query to a key (Raffel et al. 2020, arXiv:1910.10683).

    Half of the buckets are for keys after the query. In each half, half are for one distance each, the others for
    ranges that grow exponentially; the last also takes all farther distances.
    """
    distances = np.arange(-BUCKETED_DISTANCE, BUCKETED_DISTANCE + 1)
    half = buckets // 2
    exact = half // 2
    away = np.abs(distances)
    grown = np.log(np.maximum(away, 1).astype(np.float32) / exact) / math.log(BUCKETED_DISTANCE / exact)
    far = np.minimum(exact + (grown * (half - exact)).astype(np.int64), half - 1)
    return np.where(distances > 0, half, 0) + np.where(away < exact, away, far)


def relative_places(positions: int, span: int, buckets: int, reach: int) -> NDArray[np.int32]:
    """DeBERTa's row for each distance j - i from a query at i to a key at j, from 1 - positions to positions - 1.

    Of 2 span rows, those before the middle are for later keys. With `buckets` (He et al. 2021, arXiv:2111.09543) half
    as many near distances have rows of their own, and ranges that grow exponentially up to `reach` have the others.
    """
    before = np.arange(positions - 1, -positions, -1)  # i - j
    if buckets:
        middle, away = buckets // 2, np.abs(before)
        far = np.where(away < middle, middle - 1, away).astype(np.float32) / np.float32(middle)
        most = np.log(np.float32((reach - 1) / middle))
        grown = np.ceil(np.log(far) / most * np.float32(middle - 1)) + middle
        before = np.where(away <= middle, before, grown.astype(np.int64) * np.sign(before))
    return np.clip(before + span, 0, 2 * span - 1).astype(np.int32)


def alibi_slopes(num_heads: int) -> NDArray[np.float32]:
    """A geometric sequence by head; heads beyond a power of two take every other slope of twice as many.

    Press et al. 2022, arXiv:2108.12409, and the paper's released code.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(num_heads - power)]
    return np.array(slopes, np.float32)


def _yarn_scale(spec: RopeSpec) -> float:
    """The paper's temperature as a scale of cos and sin (section 3.4), unless the config gives its own."""
    if spec.attention_factor is not None:
        return spec.attention_factor

    def scale(weight: float) -> float:
        return 1.0 if spec.factor <= 1 else 0.1 * weight * math.log(spec.factor) + 1.0

    if spec.mscale and spec.mscale_all_dim:
        return scale(spec.mscale) / scale(spec.mscale_all_dim)
    return scale(1.0)
