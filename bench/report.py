"""Writes the tables and plots of bench/README.md, and the tables of docs/gguf.md, from the runs in bench/results/.

    python bench/report.py            rewrite the tables between the markers, and bench/plots/*.svg
    python bench/report.py --check    exit with status 1 if any of them is out of date

A run is one JSON file: machine, date, threads, engines, commands, notes, and rows. A row has a model, a task, the type
of the weights (and of the KV cache if it is not the weights'), a unit, and for each engine the median of its rounds
with the lowest and highest. Seconds are better when lower, all other units when higher.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ENGINES = ("llama.cpp", "OpenVINO", "vLLM", "Quire")
COLORS = {"llama.cpp": "#b8b8b8", "OpenVINO": "#8c8c8c", "vLLM": "#606060", "Quire": "#c2410c"}
WIDTH, LABEL, BAR, GAP = 820, 380, 11, 12

Row = dict[str, Any]


def runs() -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted((HERE / "results").glob("*.json"))}


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def cell(value: dict[str, float] | None) -> str:
    """Median, with the range if there is one."""
    if value is None:
        return ""
    low, high = value.get("low"), value.get("high")
    spread = (
        f" ({number(low)} to {number(high)})" if low is not None and high is not None and low < high else ""
    )
    return f"{number(value['median'])}{spread}"


def advantage(row: Row) -> float | None:
    """How many times as fast as the best of the others Quire is, from the medians."""
    others = [value["median"] for name, value in row["engines"].items() if name != "Quire"]
    if not others or "Quire" not in row["engines"]:
        return None
    ours = row["engines"]["Quire"]["median"]
    ratio: float = min(others) / ours if row["unit"] == "s" else ours / max(others)
    return ratio


def held(row: Row) -> str:
    weights: str = row["weights"]
    return weights + (f", {row['kv_cache']} cache" if "kv_cache" in row else "")


def ratio_of(row: Row) -> str:
    """The median of the rounds' own ratios if it is known, else the ratio of the medians."""
    known = row.get(
        "times_as_fast", {"median": advantage(row)}
    )  # null: not measured in turns, so not compared
    ratio = known and known["median"]
    return f"{number(ratio)} x" if ratio else ""


def overview(results: dict[str, dict[str, Any]], names: list[str]) -> str:
    """Quire beside the best of its peers, for the workloads that most of the machines `names` ran."""
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    for name in names:
        for row in results[name]["rows"]:
            if advantage(row) is not None:
                key = (row["model"], row["task"], row["weights"])
                found.setdefault(key, {})[name] = ratio_of(row)
    titles = [results[name]["machine"]["name"] for name in names]
    lines = ["| | " + " | ".join(titles) + " |", "|---|" + "---:|" * len(names)]
    for (model, task, weights), ratios in found.items():
        if len(ratios) > len(names) / 2:
            cells = [ratios.get(name, "") for name in names]
            lines.append(f"| {model}: {task}, {weights} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def table(run: dict[str, Any]) -> str:
    engines = [e for e in ENGINES if any(e in row["engines"] for row in run["rows"])]
    lines = [
        "| Model | Workload | Weights | " + " | ".join(engines) + " | Quire is |",
        "|---|---|---|" + "---:|" * (len(engines) + 1),
    ]
    for row in run["rows"]:
        figures = [cell(row["engines"].get(name)) for name in engines]
        cells = [row["model"], f"{row['task']}, {row['unit']}", held(row), *figures, ratio_of(row)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def shares(run: dict[str, Any]) -> str:
    """Shares of the machine's limits, measured in turns with them."""
    lines = ["| | share |", "|---|---|"]
    for part in run.get("shares_of_limits", []):
        for row in part["rows"]:
            figure = f" ({row['figure']})" if "figure" in row else ""
            lines.append(f"| {row['product']}{figure} | {row['share']} |")
    return "\n".join(lines)


def plot(run: dict[str, Any]) -> str:
    """An SVG of bars: each engine's speed, with the best of Quire's peers as 1."""
    rows = [row for row in run["rows"] if row.get("plotted", True) and advantage(row) is not None]
    top, body, y = 54, [], 54
    longest = max(3.0, *(advantage(row) or 0 for row in rows))
    longest = min(longest, 5.0)
    scale = (WIDTH - LABEL - 70) / longest
    for row in rows:
        engines = [e for e in ENGINES if e in row["engines"]]
        others = [row["engines"][e]["median"] for e in engines if e != "Quire"]
        best = min(others) if row["unit"] == "s" else max(others)
        middle = y + len(engines) * BAR / 2 + 4
        body.append(
            f'<text x="{LABEL - 10}" y="{middle:.0f}" text-anchor="end">'
            f"{row['model']}: {row['task']}, {held(row)}</text>"
        )
        for engine in engines:
            value = row["engines"][engine]["median"]
            speed = best / value if row["unit"] == "s" else value / best
            length = min(speed, longest) * scale
            note = f"{speed:.1f} x" if engine == "Quire" else ""
            body.append(
                f'<rect x="{LABEL}" y="{y}" width="{length:.1f}" height="{BAR - 2}" fill="{COLORS[engine]}"/>'
                f'<text x="{LABEL + length + 5:.1f}" y="{y + BAR - 2}" font-size="10">{note}</text>'
            )
            y += BAR
        y += GAP
    legend, x = [], LABEL
    for engine in ENGINES:
        if any(engine in row["engines"] for row in rows):
            legend.append(
                f'<rect x="{x}" y="28" width="10" height="10" fill="{COLORS[engine]}"/>'
                f'<text x="{x + 15}" y="37">{engine}</text>'
            )
            x += 90
    line = f'<line x1="{LABEL + scale:.1f}" y1="{top - 8}" x2="{LABEL + scale:.1f}" y2="{y - GAP}" stroke="#000"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="{LABEL}" y="16">Speed beside the best of the others (1), {run["machine"]["name"]}</text>'
        + "".join(legend + body)
        + line
        + "</svg>\n"
    )


def fill(page: str, results: dict[str, dict[str, Any]]) -> str:
    """The page with each block made anew: `<!-- KIND NAME... -->` up to `<!-- end -->`."""
    pieces = page.split("<!-- ")
    for index, piece in enumerate(pieces):
        words = piece.split(" -->")[0].split()
        made = None
        if words[:1] == ["overview"]:
            made = overview(results, words[1:])
        elif words[:1] == ["table"]:
            made = table(results[words[1]])
        elif words[:1] == ["shares"]:
            made = shares(results[words[1]])
        if made is not None:
            pieces[index] = f"{' '.join(words)} -->\n{made}\n"
    return "<!-- ".join(pieces)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the tables and plots of bench/README.md.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if something is out of date"
    )
    check = parser.parse_args().check
    results = runs()
    page = HERE / "README.md"
    made = {path: fill(path.read_text(), results) for path in (page, HERE.parent / "docs" / "gguf.md")}
    for name, run in results.items():
        if f"plots/{name}.svg" in made[page]:
            made[HERE / "plots" / f"{name}.svg"] = plot(run)
    stale = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
    for path in [] if check else stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(made[path])
    for path in stale:
        print(f"{'out of date' if check else 'wrote'}: {path}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
