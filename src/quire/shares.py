"""Shares of a pool that all users have in common: who holds most gives way first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


def largest_holder(holdings: Iterable[tuple[str, int]]) -> str:
    """Name the owner whose holdings are most together; of equals the first."""
    totals: Counter[str] = Counter()
    for owner, amount in holdings:
        totals[owner] += amount
    return max(totals, key=totals.__getitem__)
