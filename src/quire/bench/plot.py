"""Plots of a benchmark. Only this module needs matplotlib, an extra."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quire.bench.metrics import tokens_by_second
from quire.errors import ConfigError
from quire.lazy import need

INK, MUTED, GRID = "#1c2330", "#667085", "#e4e7ec"
COLOURS = ("#2f6fed", "#e0662f", "#14936b", "#8a4fd3")


def need_matplotlib() -> Any:
    """Import matplotlib's figure module. Raises ConfigError if it is not installed."""
    need("--plot", "matplotlib")
    return importlib.import_module("matplotlib.figure")


def plot_sweep(results: Sequence[dict[str, Any]], load: str, path: Path) -> None:
    """Plot the median and highest percentile of TTFT and ITL, and output tokens per second, over the load.

    `load` is "request_rate" or "max_concurrency"; an infinite rate is drawn at the rate reached.
    """
    figure = need_matplotlib().Figure(figsize=(11, 3.8), layout="constrained")
    points = sorted(results, key=lambda r: _load(r, load))
    x = [_load(r, load) for r in points]
    labels = [_load_label(r, load) for r in points]
    for axes, name, title in zip(
        figure.subplots(1, 3),
        ("ttft", "itl", None),
        ("Time to first token (ms)", "Inter-token latency (ms)", "Output tokens per second"),
        strict=True,
    ):
        if name is None:
            axes.plot(x, [r["output_throughput"] for r in points], "o-", color=COLOURS[2])
        else:
            for key, colour in zip(_spread_keys(points[0], name), COLOURS, strict=False):
                label = key.removesuffix(f"_{name}_ms")
                axes.plot(x, [r[key] for r in points], "o-", color=colour, label=label)
            if axes.lines:
                axes.legend(frameon=False)
        axes.set_xticks(x, labels)
        dress(axes, title, load.replace("_", " "))
    write_figure(figure, f"{points[0]['model_id']}: latency over load", path)


def plot_run(result: dict[str, Any], path: Path) -> None:
    """Plot one load: the share of requests (or gaps) below a latency, and output tokens in each second."""
    figure = need_matplotlib().Figure(figsize=(11, 3.8), layout="constrained")
    axes = figure.subplots(1, 3)
    done = [i for i, error in enumerate(result["errors"]) if not error]
    ttfts = [result["ttfts"][i] for i in done]
    gaps = [gap for i in done for gap in result["itls"][i]]
    for ax, values, title in (
        (axes[0], ttfts, "Time to first token"),
        (axes[1], gaps, "Inter-token latency"),
    ):
        ms = np.sort(np.array(values or [0.0])) * 1000
        ax.plot(ms, np.arange(1, len(ms) + 1) / len(ms), color=COLOURS[0])
        dress(ax, f"{title}: share at most", "ms")
    keys = ("start_times", "ttfts", "itls", "output_lens")
    seconds = tokens_by_second(*([result[key][i] for i in done] for key in keys))
    axes[2].step(range(len(seconds)), seconds, where="post", color=COLOURS[2])
    dress(axes[2], "Output tokens in each second", "seconds")
    write_figure(figure, f"{result['model_id']}: {len(done)} requests", path)


def _spread_keys(result: dict[str, Any], name: str) -> list[str]:
    """List the keys of the median and the requested percentiles."""
    keys = [key for key in result if key.endswith(f"_{name}_ms")]
    return [key for key in keys if key.startswith(("median_", "p"))]


def _load(result: dict[str, Any], load: str) -> float:
    value = result[load]
    return float(result["request_throughput"]) if value == "inf" else float(value)


def _load_label(result: dict[str, Any], load: str) -> str:
    value = result[load]
    return "all at once" if value == "inf" else f"{value:g}"


def dress(axes: Any, title: str, unit: str) -> None:
    """Give axes their title, the unit of x, a grid and Quire's colours."""
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.set_xlabel(unit, color=MUTED, fontsize=9)
    axes.set_ylim(bottom=0)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=8, length=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


def write_figure(figure: Any, title: str, path: Path) -> None:
    """Save a figure under its title. Raises ConfigError if the file cannot be written."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path} cannot be written: {error}") from error
