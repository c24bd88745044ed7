"""Prints the figures of a benchmark beside the limits of the machine, measured in the same run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

HOURS_PER_MONTH = 730


def cost_per_million(price_per_hour: float, tokens_per_second: float) -> float:
    """Compute the cost of a million tokens at this rate."""
    return price_per_hour / 3600 / tokens_per_second * 1e6


def cost_per_month(price_per_hour: float) -> float:
    return price_per_hour * HOURS_PER_MONTH


@dataclass(frozen=True, slots=True)
class Figure:
    key: str
    label: str
    value: float
    unit: str
    limit: float | None
    spread: tuple[float, float] | None


WIDE = 80  # columns of a terminal that has room for the spread


def readable(value: float) -> str:
    """Format four significant digits, without an exponent for large values: 24,893 and 0.0123."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def share_of(value: float, limit: float, digits: int = 0) -> str:
    """Write a value as a share of a measured limit. More than all is noise: other work ran while one was measured."""
    share = value / limit
    return f"{share:.{digits}%}" + (" (noise)" if share > 1 else "")


@dataclass(slots=True)
class Report:
    """Rows in order. `show` prints them and, if a file is named, writes them as JSON by key."""

    title: str
    figures: list[Figure] = field(default_factory=list)

    def row(
        self,
        key: str,
        label: str,
        value: float,
        unit: str,
        limit: float | None = None,
        spread: list[float] | None = None,
    ) -> None:
        ends = (min(spread), max(spread)) if spread else None
        self.figures.append(Figure(key, label, value, unit, limit, ends))

    def costs(self, price_per_hour: float, tokens_per_second: float) -> None:
        """Add two rows: the cost of a million output tokens at this rate, and of the machine per month."""
        cost = cost_per_million(price_per_hour, tokens_per_second)
        self.row("cost_per_million_tokens", "a million output tokens cost", cost, "")
        self.row("cost_per_month", "the machine costs per month", cost_per_month(price_per_hour), "")

    def as_dict(self) -> dict[str, object]:
        figures: dict[str, object] = {"title": self.title}
        for f in self.figures:
            figures[f.key] = f.value
            if f.limit is not None:
                figures[f"{f.key}_limit"] = f.limit
        return figures

    def show(self, output_json: str | None = None) -> None:
        console = Console()
        wide = console.width >= WIDE
        heads = ["median", *(["min", "max"] if wide else []), "limit", "share"]
        table = Table("", *heads, title=self.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for f in self.figures:
            scale, unit = (1e3, "ms") if f.unit == "s" and f.value < 1 else (1.0, f.unit)
            ends = [readable(end * scale) for end in f.spread] if f.spread else ["", ""]
            limit = readable(f.limit) if f.limit is not None else ""
            share = share_of(f.value, f.limit) if f.limit else ""
            value = f"{readable(f.value * scale)} {unit}"
            table.add_row(f.label, value, *(ends if wide else []), limit, share)
        console.print(table)
        if output_json is not None:
            Path(output_json).write_text(json.dumps(self.as_dict(), indent=1) + "\n")
