"""Computes the cost of tokens on a machine that is paid by the hour."""

from __future__ import annotations

HOURS_PER_MONTH = 730


def cost_per_million(price_per_hour: float, tokens_per_second: float) -> float:
    """Compute the cost of a million tokens at this rate."""
    return price_per_hour / 3600 / tokens_per_second * 1e6


def cost_per_month(price_per_hour: float) -> float:
    return price_per_hour * HOURS_PER_MONTH
