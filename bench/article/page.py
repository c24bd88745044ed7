"""Measure the figures of articles, and write docs/articles.md's section and plots from the results.

    python -m bench.article.page --models DIR --data DIR kv-waste batching     measure these; without names, all
    python -m bench.article.page --page                                        only write the section and the plots
    python -m bench.article.page --check                                       exit with status 1 if out of date

DIR holds the models S, E and T of the other benchmarks, and the public data sets. A study's result is one JSON file in
bench/results/articles/.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.article.command import STUDIES, load
from bench.article.curves import Curves, plot_curves
from quire.bench.report import readable

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "bench" / "results" / "articles"
DOCS = ROOT / "docs"
BEGIN, END = "<!-- figures -->", "<!-- end -->"
S, T = ("--model", "S"), ("--model", "T")
TRACE = ("--data", "traces-azure2023/AzureLLMInferenceTrace_conv.csv")
RUNS: dict[str, tuple[str, ...]] = {
    "plain-loop": (*T, "--max-model-len", "1024"),
    "kv-waste": TRACE,
    "beam-sharing": (),
    "batching": (*S, "--scale", "0.25", "--max-model-len", "1024"),
    "prefix-caching": (*S, "--scale", "0.3"),
    "shared-prompts": (*T, "--max-model-len", "1024"),
    "radix": (*T, "--max-model-len", "1024"),
    "attention-memory": S,
    "tiled-attention": (),
    "kv-formula": (),
    "quantized-size": (),
    "chunked-prefill": (*S, "--scale", "0.5", "--max-model-len", "2112"),
    "weights-by-batch": (*S, "--scale", "0.3"),
    "speculation": (),
    "structured": (*S, "--data", "struct-jsonschemabench", "--scale", "0.05"),
    "batch-size": (*T, "--scale", "0.5"),
    "request-rate": (*T,),
    "sharded-loras": (*T, "--max-model-len", "1024"),
    "kv-cache": (*S, "--scale", "0.5"),
    "built-engine": S,
    "quantization": ("--data", "text-tinystories/tinystories_union.txt", "--scale", "0.5"),
}
"""RUNS has the options of each study, with models and data by their names in the folders."""


def measure(name: str, models: Path, data: Path) -> None:
    """Run a study and keep its result with the command that made it."""
    options = RUNS[name]
    places = [
        str((models if before == "--model" else data) / word) if before in ("--model", "--data") else word
        for before, word in zip(("", *options), options, strict=False)
    ]
    RESULTS.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "bench.article", name, *places]
        partial = RESULTS / f"{name}.partial"
        subprocess.run([*command, "--output-json", file.name, "--resume", str(partial)], check=True)
        result = json.loads(Path(file.name).read_text())
    result["command"] = " ".join(["python -m bench.article", name, *options])
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def section(name: str, result: dict[str, Any]) -> str:
    """Write a study's claims, finding, table, command and plot in Markdown."""
    study = load(name)
    lines = [f"### {study.title}", ""]
    for claim in study.claims:
        wrong = f" **Wrong:** {claim.wrong}" if claim.wrong else ""
        lines.append(f"- Claimed: {claim.says} ({'; '.join(claim.articles)}).{wrong}")
    lines += ["", f"Found: {result['finding']}", ""]
    lines.append("| " + " | ".join(result["columns"]) + " |")
    lines.append("|---|" + "---:|" * (len(result["columns"]) - 1))
    lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in result["rows"]]
    note = f"{result['note']} " if result["note"] else ""
    lines += ["", f"{note}`{result['command']}`"]
    if result["plot"]:
        lines += ["", f"![{study.title}](images/articles/{name}.svg)"]
    return "\n".join(lines)


def _cell(value: str | float) -> str:
    return value if isinstance(value, str) else readable(value)


def page(text: str, results: dict[str, dict[str, Any]]) -> str:
    """Return the page with its section of figures made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    sections = [section(name, results[name]) for name in STUDIES if name in results]
    return f"{before}{BEGIN}\n\n" + "\n\n".join(sections) + f"\n\n{END}{after}"


def draw(results: dict[str, dict[str, Any]]) -> None:
    """Draw the plot of each study that has curves."""
    folder = DOCS / "images" / "articles"
    folder.mkdir(parents=True, exist_ok=True)
    for name, result in results.items():
        if result["plot"]:
            plot_curves(result["title"], Curves(**result["plot"]), folder / f"{name}.svg")


def main() -> int:
    """Measure, then write or check the page; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(STUDIES))
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--page", action="store_true", help="measure nothing; write the page and the plots")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    options = parser.parse_args()
    for name in [] if options.page or options.check else options.names or STUDIES:
        measure(name, options.models, options.data)
    results = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    file = DOCS / "articles.md"
    made = page(file.read_text(), results)
    if options.check:
        return int(made != file.read_text())
    file.write_text(made)
    draw(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
