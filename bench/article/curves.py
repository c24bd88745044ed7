"""Curves of a study, and their plot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.bench.plot import COLOURS, dress, need_matplotlib, write_figure


@dataclass(frozen=True, slots=True)
class Curves:
    """Curves by name, of points (x, y), and the names of the axes."""

    x: str
    y: str
    points: dict[str, list[tuple[float, float]]]
    log_x: bool = False


def plot_curves(title: str, curves: Curves, path: Path) -> None:
    """Draw the curves of a study."""
    figure = need_matplotlib().Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for i, (name, points) in enumerate(curves.points.items()):
        style = "o-" if i < len(COLOURS) else "o--"
        axes.plot(*zip(*points, strict=True), style, color=COLOURS[i % len(COLOURS)], label=name)
    if curves.log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    if len(curves.points) > 1:
        axes.legend(frameon=False, fontsize=8)
    dress(axes, curves.y, curves.x)
    write_figure(figure, title, path)
