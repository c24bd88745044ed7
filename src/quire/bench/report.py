"""Prints the figures of a benchmark beside the limits of the machine, measured in the same run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Figure:
    key: str
    label: str
    value: float
    unit: str
    limit: float | None
    spread: tuple[float, float] | None


def readable(value: float) -> str:
    """Four significant digits, without an exponent for large values: 24,893 and 0.0123."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


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

    def as_dict(self) -> dict[str, object]:
        figures: dict[str, object] = {"title": self.title}
        for f in self.figures:
            figures[f.key] = f.value
            if f.limit is not None:
                figures[f"{f.key}_limit"] = f.limit
        return figures

    def show(self, output_json: str | None = None) -> None:
        table = Table("", "median", "min", "max", "limit", "share", title=self.title, title_justify="left")
        for f in self.figures:
            low, high = (readable(f.spread[0]), readable(f.spread[1])) if f.spread else ("", "")
            limit = readable(f.limit) if f.limit is not None else ""
            share = f"{f.value / f.limit:.0%}" if f.limit else ""
            table.add_row(f.label, f"{readable(f.value)} {f.unit}", low, high, limit, share)
        Console().print(table)
        if output_json is not None:
            Path(output_json).write_text(json.dumps(self.as_dict(), indent=1) + "\n")
