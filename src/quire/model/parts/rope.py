"""Rotary position embedding: its kinds as data, and the frequencies of each. Knows no config spelling."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.devices.protocol import Rope
from quire.errors import ModelError
from quire.model.parts.bounds import MAX_HEAD_DIM, MAX_POSITION

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
Frequencies = NDArray[np.float64]


class RopeSpec(msgspec.Struct, frozen=True):
    """Rotary position embedding, half-split pairs.

    Kinds: default; linear (positions divided by factor); dynamic (equals default within the trained length, which the
    engine does not exceed); llama3 (Llama 3.1's frequency bands); yarn (Peng et al. 2023, arXiv:2309.00071); longrope
    (frequencies divided by `factors`, or by `short_factors` in a model for sequences of at most the original length;
    Ding et al. 2024, arXiv:2402.13753); proportional (the first `rotated_pairs`
    pairs turn at the frequencies of the whole head, the others do not turn). Some kinds need the fields beyond theta
    and rotary_dim; of others `factors` divide the frequencies too. `backwards` turns by the negative angle. `share` is
    an odd number of elements, of which one more turn: their frequencies fall over `share`.
    """

    kind: RopeKind
    theta: float
    rotary_dim: int
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()
    rotated_pairs: int = 0
    backwards: bool = False
    share: int | None = None

    @property
    def temperature(self) -> float:
        """Yarn's factor of scores by mscale_all_dim (DeepSeek-V2, arXiv:2405.04434), beside that of cos and sin."""
        if self.kind != "yarn" or not self.mscale_all_dim:
            return 1.0
        return yarn_magnitude(self.factor, self.mscale_all_dim) ** 2

    def for_length(self, length: int) -> RopeSpec:
        """The rope of a model for sequences of at most `length` tokens."""
        if not self.short_factors or length > self.original_max_position:
            return self
        return msgspec.structs.replace(self, factors=self.short_factors, short_factors=())

    def check(self, where: str) -> None:
        """Raise ModelError, naming `where` and the field, for a rope whose frequencies are no numbers."""
        scaled = self.kind in ("llama3", "yarn", "longrope")
        for name, sound in (
            ("rotary_dim", 2 <= self.rotary_dim <= MAX_HEAD_DIM and self.rotary_dim % 2 == 0),
            ("theta", self.theta > 1),
            ("factor", self.factor > 0),
            ("original_max_position", not scaled or 2 <= self.original_max_position <= MAX_POSITION),
            ("high_freq_factor", self.high_freq_factor >= self.low_freq_factor),
            ("beta_fast", self.beta_fast > 0),
            ("beta_slow", self.beta_slow > 0),
            ("factors", self.kind != "longrope" or len(self.factors) == self.rotary_dim // 2),
            ("short_factors", len(self.short_factors) in (0, len(self.factors))),
            ("factors", all(factor > 0 for factor in (*self.factors, *self.short_factors))),
        ):
            if not sound:
                raise ModelError(f"{where}: {name} of the rope cannot be {getattr(self, name)!r:.80}")


def make_rope(spec: RopeSpec) -> Rope:
    """Frequencies in float64, rounded once to float32: [rotary_dim / 2], and the scale of cos and sin."""
    pairs: NDArray[Any] = np.arange(0, spec.rotary_dim, 2, dtype=np.float64)
    plain: Frequencies = spec.theta ** (-pairs / (spec.share or spec.rotary_dim))
    scale = 1.0
    if spec.factors and spec.kind != "longrope":
        plain = plain / np.array(spec.factors)
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

    Llama 4 Scout has equal factors: nothing lies in between.
    Grattafiori et al. 2024, arXiv:2407.21783; the bands follow Meta's released code.
    """
    turns = spec.original_max_position * plain / (2 * math.pi)  # of each pair, over the trained context
    width = spec.high_freq_factor - spec.low_freq_factor
    above = turns - spec.low_freq_factor
    blend = np.clip(above / width if width else np.sign(above), 0.0, 1.0)
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


def _yarn_scale(spec: RopeSpec) -> float:
    """The paper's temperature as a scale of cos and sin (section 3.4), unless the config gives its own."""
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return yarn_magnitude(spec.factor, spec.mscale) / yarn_magnitude(spec.factor, spec.mscale_all_dim)
    return yarn_magnitude(spec.factor, 1.0)


def yarn_magnitude(factor: float, weight: float) -> float:
    """Compute the factor of cos and sin for a sequence that is `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
