"""`quire plan`: what a model takes in memory, how much it can serve at once, and how fast this machine allows.

Reads config and headers only. The speeds are bounds from limits measured now: reading the weights once a step, of the
head what finds the largest logit, and two operations per parameter and token. Of a config.json alone it tells what
does not depend on the machine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from quire.cli import Command
from quire.config import DeviceConfig, EngineConfig, check_options, option
from quire.devices.protocol import MachineLimits
from quire.engine.start import Plan, make_backend, plan_engine, quantized_weights
from quire.errors import ConfigError
from quire.model.load import outline_config
from quire.runtime.memory import GIB
from quire.weights.schemes import weights_name


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of `quire plan`."""

    input_len: int = option(1024, "Prompt length to plan for, in tokens.", low=1)
    output_len: int = option(256, "Output length to plan for, in tokens.", low=1)
    config: str = option("", "A config.json alone, without weights, in the place of a model.")
    json: bool = option(False, "Print JSON instead of tables.")

    def __post_init__(self) -> None:
        check_options(self)


def run(config: EngineConfig, options: PlanOptions) -> None:
    if options.config:
        figures = describe_config(config, Path(options.config))
        tables = _config_tables(figures, options.config)
    else:
        plan = plan_engine(config)
        figures = describe(plan, plan.backend.measure_limits(plan.arithmetic), options)
        tables = _tables(figures, plan)
    if options.json:
        print(json.dumps(figures, indent=1))
        return
    console = Console()
    for title, rows in tables.items():
        table = Table("", "", title=title, title_justify="left", show_header=False)
        for row in rows:
            table.add_row(*row)
        console.print(table)


def describe_config(config: EngineConfig, path: Path) -> dict[str, Any]:
    """What a config.json tells: sizes in bytes, positions. ModelError names the field that is not understood."""
    if config.model.model:
        raise ConfigError(f"--config takes the place of a model; leave {config.model.model} out")
    outline = make_backend(DeviceConfig(threads=1)).outline()
    model = outline_config(path, outline, config.model.dtype, quantized_weights(config.model))
    kv_dtype = config.cache.kv_cache_dtype
    kv_spec = model.spec.kv_spec(model.dtype if kv_dtype == "auto" else kv_dtype)
    longest = config.model.max_model_len or model.spec.max_position
    return {
        "architecture": model.spec.architecture,
        "parameters": model.info.num_parameters,
        "dtype": model.dtype,
        "kv_dtype": kv_spec.dtype,
        "weight_bytes": model.weight_bytes,
        "kv_bytes_per_token": kv_spec.bytes_per_token,
        "max_model_len": longest,
        "sequence_bytes": longest * kv_spec.bytes_per_token,
    }


def _bits(figures: dict[str, Any]) -> str:
    return f"{8 * figures['weight_bytes'] / figures['parameters']:.1f} bits each"


def _config_tables(figures: dict[str, Any], title: str) -> dict[str, list[tuple[str, str]]]:
    return {
        f"{title}: {figures['architecture']}": [
            ("parameters", f"{figures['parameters']:,}"),
            ("weights", f"{figures['weight_bytes'] / GIB:.3f} GiB ({figures['dtype']}, {_bits(figures)})"),
            ("KV per token", f"{figures['kv_bytes_per_token']:,} bytes ({figures['kv_dtype']})"),
            (
                f"KV of {figures['max_model_len']:,} tokens",
                f"{figures['sequence_bytes'] / GIB:.3f} GiB",
            ),
        ]
    }


def describe(plan: Plan, limits: MachineLimits, options: PlanOptions) -> dict[str, Any]:
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
        "weights": weights_name(model.quantized, model.dtype),
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
        "decode_tok_s_bound": read / (plan.step_bytes + kv_bytes * context),
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
            ("weights", f"{gib('weight_bytes')} ({figures['weights']}, {_bits(figures)})"),
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
