"""`quire plan`: what a model takes in memory, how much it can serve at once, and how fast this machine allows.

Reads config and headers only. The speeds are bounds from limits measured now: reading all weights once a step, and
two operations per parameter and token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from quire.bench.report import Limits, measure_limits
from quire.cli import Command
from quire.config import EngineConfig, check_options, option
from quire.engine.start import Plan, plan_engine
from quire.runtime.memory import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of `quire plan`."""

    input_len: int = option(1024, "Prompt length to plan for, in tokens.", low=1)
    output_len: int = option(256, "Output length to plan for, in tokens.", low=1)
    json: bool = option(False, "Print JSON instead of tables.")

    def __post_init__(self) -> None:
        check_options(self)


def run(config: EngineConfig, options: PlanOptions) -> None:
    plan = plan_engine(config)
    limits = measure_limits(plan.backend.threads)
    figures = describe(plan, limits, options)
    if options.json:
        print(json.dumps(figures, indent=1))
        return
    console = Console()
    for title, rows in _tables(figures, plan).items():
        table = Table("", "", title=title, title_justify="left", show_header=False)
        for row in rows:
            table.add_row(*row)
        console.print(table)


def describe(plan: Plan, limits: Limits, options: PlanOptions) -> dict[str, Any]:
    """All figures by name: bytes, tokens, sequences, and bounds in tokens per second."""
    memory, model = plan.memory, plan.model
    kv_bytes = plan.kv_spec.bytes_per_token
    length = options.input_len + options.output_len
    read, peak = limits.read_gbs * 1e9, limits.peak_gflops * 1e9
    flops_per_token = 2.0 * plan.layer_parameters
    context = options.input_len + options.output_len / 2
    return {
        "parameters": model.num_parameters,
        "dtype": model.dtype,
        "kv_dtype": plan.kv_spec.dtype,
        "weight_bytes": memory.weights,
        "workspace_bytes": memory.workspace,
        "kv_bytes_per_token": kv_bytes,
        "kv_cache_bytes": memory.kv_cache,
        "total_bytes": memory.total,
        "available_bytes": memory.available,
        "kv_tokens": memory.num_tokens,
        "max_model_len": memory.max_model_len,
        "sequence_len": length,
        "max_sequences": {n: memory.num_tokens // n for n in _lengths(length, memory.max_model_len)},
        "read_gb_s": limits.read_gbs,
        "peak_gflop_s": limits.peak_gflops,
        "decode_tok_s_bound": read / (memory.weights + kv_bytes * context),
        "prefill_tok_s_bound": peak / flops_per_token,
        "first_token_s_bound": options.input_len * flops_per_token / peak,
    }


def _lengths(wanted: int, longest: int) -> list[int]:
    """Sequence lengths worth showing: powers of four up to the model's length, and the one asked for."""
    powers = [4**k for k in range(4, 12) if 4**k < longest]
    return sorted({*powers, min(wanted, longest), longest})


def _tables(figures: dict[str, Any], plan: Plan) -> dict[str, list[tuple[str, str]]]:
    def gib(name: str) -> str:
        return f"{figures[name] / GIB:.3f} GiB"

    return {
        f"{plan.name} on {plan.backend.name}": [
            ("parameters", f"{figures['parameters']:,}"),
            ("weights", f"{gib('weight_bytes')} ({figures['dtype']})"),
            ("workspace", gib("workspace_bytes")),
            ("KV cache", f"{gib('kv_cache_bytes')} ({figures['kv_dtype']}), {figures['kv_tokens']:,} tokens"),
            ("KV per token", f"{figures['kv_bytes_per_token']:,} bytes"),
            ("in all", f"{gib('total_bytes')} of {gib('available_bytes')} free"),
        ],
        "sequences that fit at once": [
            (f"of {length:,} tokens", f"{count:,}") for length, count in figures["max_sequences"].items()
        ],
        "at most, by the limits measured now": [
            ("memory read", f"{figures['read_gb_s']:.1f} GB/s"),
            ("arithmetic", f"{figures['peak_gflop_s']:.0f} GFLOP/s"),
            ("decode, one sequence", f"{figures['decode_tok_s_bound']:.1f} tok/s"),
            ("prefill", f"{figures['prefill_tok_s_bound']:.0f} tok/s"),
            ("time to first token", f"{figures['first_token_s_bound'] * 1e3:.0f} ms"),
        ],
    }


COMMAND = Command(run, PlanOptions, arguments=("model",))
