"""The tables that `quire bench serve` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from quire.bench.metrics import METRICS


def load_table(result: dict[str, Any], dataset: str, timed: bool) -> Table:
    """Make the table of one load's counts and rates."""
    title = f"{result['model_id']}: {result['num_prompts']} requests of {dataset}"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")

    def row(label: str, value: Any, form: str = ",.2f") -> None:
        if value is not None:
            table.add_row(label, value if isinstance(value, str) else format(value, form))

    row("Request rate configured (req/s)", "the trace's" if timed else result["request_rate"])
    row("Most requests in flight, configured", result["max_concurrency"], "d")
    row("Benchmark duration (s)", result["duration"])
    row("Successful requests", result["completed"], "d")
    row("Failed requests", result["failed"], "d")
    row("Total input tokens", result["total_input_tokens"], ",d")
    row("Total generated tokens", result["total_output_tokens"], ",d")
    row("Request throughput (req/s)", result["request_throughput"])
    row("Request goodput (req/s)", result["request_goodput"])
    row("Output token throughput (tok/s)", result["output_throughput"])
    row("Cost of a million output tokens", result.get("cost_per_million_tokens"), ",.4g")
    row("Peak output token throughput (tok/s)", result["max_output_tokens_per_s"])
    row("Total token throughput (tok/s)", result["total_token_throughput"])
    row("Peak concurrent requests", result["max_concurrent_requests"], "d")
    row("Prefix hit rate, server", result["prefix_hit_rate"], ".2%")
    row("Prefix hit rate, ideal infinite cache", result["ideal_prefix_hit_rate"], ".2%")
    row("Draft tokens accepted (%)", result.get("spec_decode_acceptance_rate"))
    return table


def latency_table(result: dict[str, Any], names: Sequence[str]) -> Table:
    """Make a table with one line per metric, one column per statistic, in milliseconds."""
    words = [key.split("_", 1)[0] for key in result if names and key.endswith(f"_{names[0]}_ms")]
    table = Table("ms", *words)
    for column in table.columns[1:]:
        column.justify = "right"
    for name in names:
        table.add_row(METRICS[name], *(f"{result[f'{word}_{name}_ms']:,.2f}" for word in words))
    return table
