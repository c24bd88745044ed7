"""Functions of single elements: the parameter of the operation Apply."""

from __future__ import annotations

import msgspec


class Elementwise(msgspec.Struct, frozen=True):
    """A function. csrc/plan/plan_elementwise.cpp takes its fields in order."""


class Clamp(Elementwise, frozen=True):
    """x limited to [-limit, limit]."""

    limit: float


class Temperature(Elementwise, frozen=True):
    """The row of the token at position p is multiplied by 1 + beta * log(1 + floor((p + offset) / length))."""

    beta: float
    length: int
    offset: int = 0


class XIELU(Elementwise, frozen=True):
    """alpha_p x^2 + beta x for x > 0, else alpha_n (e^min(x, eps) - 1 - x) + beta x (Huang and Schlag 2024,
    arXiv:2411.13010).
    """

    alpha_p: float
    alpha_n: float
    beta: float
    eps: float


class GELU(Elementwise, frozen=True):
    """x / 2 (1 + erf(x / sqrt 2))."""


class ColumnScale(Elementwise, frozen=True):
    """Each column of x is multiplied by its own factor."""

    factors: tuple[float, ...]


class SparseGELU(Elementwise, frozen=True):
    """GELU (its tanh form) of max(x - mean - cutoff * deviation, 0), with mean and standard deviation of the whole row.

    The statistical top-k of Spark Transformer (You et al. 2025, arXiv:2506.06644).
    """

    cutoff: float
