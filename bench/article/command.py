"""`python -m bench.article NAME` measures one of the figures that articles give for engines."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from bench.article.curves import plot_curves
from bench.article.study import Measured, Result, Setting, Study
from quire.bench.plot import need_matplotlib
from quire.bench.report import readable
from quire.cli import Command
from quire.config import EngineConfig, check_options, option
from quire.errors import ConfigError

STUDIES = {
    "plain-loop": "plain_loop",
    "kv-waste": "kv_waste",
    "beam-sharing": "beam_sharing",
    "batching": "batching",
    "prefix-caching": "prefix_caching",
    "shared-prompts": "shared_prompts",
    "radix": "radix",
    "attention-memory": "attention_memory",
    "tiled-attention": "tiled_attention",
    "kv-formula": "kv_formula",
    "quantized-size": "quantized_size",
    "chunked-prefill": "chunked_prefill",
    "weights-by-batch": "weights_by_batch",
    "speculation": "speculation",
    "structured": "structured",
    "batch-size": "batch_size",
    "request-rate": "request_rate",
    "sharded-loras": "sharded_loras",
    "kv-cache": "kv_cache",
    "built-engine": "built_engine",
    "quantization": "quantization",
}
"""STUDIES maps a study to its module, in the order of docs/articles.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArticleOptions:
    """Options of `python -m bench.article`."""

    study: str = option("", "Name of the study; without one, all are listed.")
    scale: float = option(1.0, "Share of the load to run: 0.1 for a quick look.", low=0.001, high=1)
    data: str | None = option(None, "File or folder that the study reads: a trace, or JSON schemas.")
    price_per_hour: float = option(1.0, "Price of this machine, for costs.", low=0)
    resume: str | None = option(
        None, "Keep what is measured in this file while the study runs, and go on from it.", writes="file"
    )
    output_json: str | None = option(None, "Write the table to this JSON file.", writes="file")
    plot: str | None = option(
        None, "Draw the curves to this SVG or PNG file; needs matplotlib.", writes="file"
    )

    def __post_init__(self) -> None:
        check_options(self)


def run(config: EngineConfig, options: ArticleOptions) -> None:
    """List the studies, or run one, show its table and write what the options ask for."""
    if not options.study:
        _list()
        return
    study = load(options.study)
    if options.plot is not None:
        need_matplotlib()
    data = None if options.data is None else Path(options.data)
    if data is not None and not data.exists():
        raise ConfigError(f"--data {data} does not exist")
    measured = None
    if options.resume is not None:
        settings = [options.study, options.scale, options.data, dataclasses.asdict(config)]
        measured = Measured(Path(options.resume), settings)
    result = study.measure(Setting(config, options.scale, data, options.price_per_hour, measured=measured))
    _show(study, result)
    if options.output_json is not None:
        name = {"study": options.study, "title": study.title}
        Path(options.output_json).write_text(
            json.dumps({**name, **dataclasses.asdict(result)}, indent=1) + "\n"
        )
    if options.plot is not None:
        if result.plot is None:
            raise ConfigError(f"{options.study} has no curves to --plot")
        plot_curves(study.title, result.plot, Path(options.plot))
    if measured is not None:
        measured.forget()


def load(name: str) -> Study:
    """Load the study of that name. Raises ConfigError if there is none."""
    module = STUDIES.get(name)
    if module is None:
        close = difflib.get_close_matches(name, STUDIES, 1)
        hint = f"; did you mean {close[0]}?" if close else f": choose from {', '.join(STUDIES)}"
        raise ConfigError(f"there is no study {name!r}{hint}")
    study: Study = importlib.import_module(f"bench.article.{module}").STUDY
    return study


def _list() -> None:
    table = Table("study", "measures", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in STUDIES:
        table.add_row(name, load(name).title)
    Console().print(table)


def _show(study: Study, result: Result) -> None:
    console = Console()
    table = Table(
        *result.columns, title=study.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for row in result.rows:
        table.add_row(*(cell if isinstance(cell, str) else readable(cell) for cell in row))
    console.print(table)
    for claim in study.claims:
        console.print(f"claimed: {claim.says}", highlight=False)
        if claim.wrong:
            console.print(f"  {claim.wrong}", highlight=False)
    console.print(f"found:   {result.finding}", highlight=False)


COMMAND = Command(run, ArticleOptions, arguments=("study",))
