"""`quire plan`: the memory that a model takes, how many sequences fit, and the speed that this machine allows.

Reads the config and the tensor headers only. Speeds are upper bounds: what a step reads and computes (`model/cost.py`)
beside the limits of the machine, measured now. For a config.json alone it prints what does not depend on the machine.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from quire.bench.price import cost_per_million, cost_per_month
from quire.cli import Command
from quire.config import DeviceConfig, EngineConfig, check_options, option
from quire.devices.protocol import MachineLimits
from quire.engine.plan import EnginePlan, make_backend, plan_engine
from quire.engine.rates import step_rates
from quire.engine.source import quantized_weights
from quire.errors import ConfigError
from quire.flags.uses import PLANNING
from quire.model.outline import outline_config
from quire.runtime.memory import GIB
from quire.sched.times import StepTimes, StepWork
from quire.serve.options import TARGET_STEP_TIME
from quire.weights.schemes import weights_name


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of `quire plan`."""

    input_len: int = option(1024, "Prompt length to plan for, in tokens.", low=1)
    output_len: int = option(256, "Output length to plan for, in tokens.", low=1)
    batch_size: int = option(8, "Sequences decoded together, for the second decode bound.", low=1)
    price_per_hour: float | None = option(None, "Price of this machine: adds bounds of the cost.", low=0)
    link_gbit: float = option(
        100.0, "Speed of the link between ranks in Gbit/s: that of memory, or of a network.", low=0.001
    )
    link_us: float = option(
        2.0, "Microseconds that a message between ranks takes at least; 30 to 100 for TCP.", low=0.0
    )
    config: str = option(
        "",
        "Plan for a config.json without weights, instead of a model; a file of options if it ends in .yaml.",
        replaces=("model",),
    )
    json: bool = option(False, "Print JSON instead of tables.")

    def __post_init__(self) -> None:
        check_options(self)


def run(config: EngineConfig, options: PlanOptions) -> None:
    if options.config:
        figures = describe_config(config, Path(options.config))
        tables = _config_tables(figures, options.config)
    else:
        plan = plan_engine(config, fetch=False)
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
    """Compute sizes in bytes, and positions, from a config.json. ModelError names a field that is not understood."""
    if config.model.model:
        raise ConfigError(f"--config takes the place of a model; leave out {config.model.model}")
    outline = make_backend(DeviceConfig(threads=1)).outline()
    named, quantized = config.model.architecture, quantized_weights(config.model, path)
    model = outline_config(path, outline, config.model.dtype, quantized, named)
    kv_dtype = config.cache.kv_cache_dtype
    kv_spec = model.info.kv_spec(model.dtype if kv_dtype == "auto" else kv_dtype)
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


def describe(plan: EnginePlan, limits: MachineLimits, options: PlanOptions) -> dict[str, Any]:
    """Compute all figures by name: bytes, tokens, sequences, bounds in tokens per second."""
    memory, model = plan.memory, plan.model
    kv_bytes = plan.kv_spec.bytes_per_token
    length = options.input_len + options.output_len
    first_token = _prompt_seconds(plan, limits, options)
    batch_rate = _decode_rate(plan, limits, options, options.batch_size)
    target = plan.config.scheduler.target_step_time
    target = TARGET_STEP_TIME if target is None else target
    chunk, rate = _chunk(plan, limits, target / 1e3)
    return {
        "parameters": model.num_parameters,
        "dtype": model.dtype,
        "weights": weights_name(model.quantized, model.dtype),
        "kv_dtype": plan.kv_spec.dtype,
        **_parallel(plan, options),
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
        "input_len": options.input_len,
        "batch_size": options.batch_size,
        "decode_tok_s_bound": _decode_rate(plan, limits, options, 1),
        "batch_tok_s_bound": batch_rate,
        "prefill_tok_s_bound": options.input_len / first_token,
        "first_token_s_bound": first_token,
        "target_step_ms": target,
        "chunk_tokens_bound": chunk,
        "chunk_tok_s_bound": rate,
        **_costs(options.price_per_hour, batch_rate),
    }


def _costs(price: float | None, rate: float) -> dict[str, float]:
    """Bound the cost of a million tokens at this rate from below, and add the machine's per month, if priced."""
    if price is None:
        return {}
    return {
        "cost_per_million_tokens_bound": cost_per_million(price, rate),
        "cost_per_month": cost_per_month(price),
    }


def _parallel(plan: EnginePlan, options: PlanOptions) -> dict[str, Any]:
    """Compute the figures of each rank, stage by stage, and what the ranks send each other."""
    spec, parallel = plan.model.spec, plan.config.parallel
    stages: list[dict[str, Any]] = [
        {
            "layers": [spec.stage(stage.shard).start, spec.stage(stage.shard).stop],
            "weight_bytes": stage.memory.weights,
            "workspace_bytes": stage.memory.workspace,
            "kv_bytes_per_token": stage.kv_spec.bytes_per_token,
            "kv_cache_bytes": stage.memory.kv_cache,
            "total_bytes": stage.memory.total,
            "sent_bytes_per_token": spec.sent_bytes(stage.shard),
            "passed_bytes_per_token": spec.passed_bytes(stage.shard),
        }
        for stage in plan.stages
    ]
    return {
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "stages": stages,
        "sent_bytes_per_token": sum(stage["sent_bytes_per_token"] for stage in stages),
        "passed_bytes_per_token": sum(stage["passed_bytes_per_token"] for stage in stages),
        "messages_per_step": _messages(plan),
        "link_gbit": options.link_gbit,
        "link_us": options.link_us,
    }


def _messages(plan: EnginePlan) -> int:
    """Count the messages that a step waits for, one after the other."""
    spec = plan.model.spec
    gathers = int(not plan.shard.whole and spec.has_head)  # of logits
    return sum(len(spec.messages(stage.shard)) + int(not stage.shard.ends) for stage in plan.stages) + gathers


def _link_seconds(plan: EnginePlan, options: PlanOptions, tokens: int) -> float:
    """Estimate the seconds in which a step's activations pass over the link, with the logits of one row."""
    spec, size = plan.model.spec, plan.shard.size
    sent = sum((size - 1) * spec.sent_bytes(s.shard) + spec.passed_bytes(s.shard) for s in plan.stages)
    logits = 4 * spec.vocab_size * (size - 1) / size if spec.has_head else 0.0
    return _messages(plan) * options.link_us * 1e-6 + (sent * tokens + logits) * 8 / (options.link_gbit * 1e9)


def _chunk(plan: EnginePlan, limits: MachineLimits, target: float) -> tuple[int, float]:
    """Find the most prompt tokens that fit in a step of `target` seconds beside one decoding sequence, and their rate.

    Without a target, the chunk is --max-num-batched-tokens.
    """
    times = StepTimes(step_rates(plan.cost, plan.kv_spec, limits.read_gbs, limits.peak_gflops))
    decoding, most = StepWork(1, 1), plan.config.scheduler.max_num_batched_tokens - 1

    def seconds(count: int) -> float:
        return times.seconds(times.with_prompt(decoding, 0, count, False))

    chunk = bisect_right(range(1, most + 1), target, key=seconds) if target else most
    return chunk, chunk / seconds(chunk)


def _decode_rate(plan: EnginePlan, limits: MachineLimits, options: PlanOptions, sequences: int) -> float:
    """Bound the tokens per second of `sequences` halfway through their outputs by reading, arithmetic and the link.

    Stages work on as many batches at once, each with its share of the sequences: the slowest sets the pace.
    """
    context = options.input_len + options.output_len // 2
    batch = -(-sequences // len(plan.stages))
    seconds = []
    for stage in plan.stages:
        read = stage.cost.step_bytes(batch) + batch * stage.cost.kv_bytes(context, stage.kv_spec)
        computed = batch * stage.cost.decode_operations(context)
        seconds.append(max(read / (limits.read_gbs * 1e9), computed / (limits.peak_gflops * 1e9)))
    link = _link_seconds(plan, options, batch)
    step = sum(seconds) + link
    return sequences / max(step, -(-sequences // batch) * (max(seconds) + link / len(seconds)))


def _prompt_seconds(plan: EnginePlan, limits: MachineLimits, options: PlanOptions) -> float:
    """Bound the seconds from a prompt to its first output by arithmetic, reading the weights once, and the link."""
    length = options.input_len
    seconds = [
        max(
            stage.cost.prompt_operations(length) / (limits.peak_gflops * 1e9),
            stage.cost.step_bytes(length) / (limits.read_gbs * 1e9),
        )
        for stage in plan.stages
    ]
    return sum(seconds) + _link_seconds(plan, options, length)


def _lengths(wanted: int, longest: int) -> list[int]:
    """Choose sequence lengths to show: powers of four up to the model's length, and the one asked for."""
    powers = [4**k for k in range(4, 12) if 4**k < longest]
    return sorted({*powers, min(wanted, longest), longest})


def _step_name(figures: dict[str, Any]) -> str:
    target = figures["target_step_ms"]
    return (
        f"a step of {target:.0f} ms (--target-step-time)" if target else "a step (--max-num-batched-tokens)"
    )


def _tables(figures: dict[str, Any], plan: EnginePlan) -> dict[str, list[tuple[str, str]]]:
    def gib(name: str) -> str:
        return f"{figures[name] / GIB:.3f} GiB"

    size, stages = figures["tensor_parallel_size"], figures["stages"]
    ranks = size * figures["pipeline_parallel_size"]
    whose = f", each of {ranks} ranks" if ranks > 1 else ""
    if len(stages) > 1:
        whose = f", each of {size} rank{'s' if size > 1 else ''} of the last of {len(stages)} stages"
    bits = f", {_bits(figures)}" if ranks == 1 else ""
    by_stage = [
        (
            f"layers {stage['layers'][0]} to {stage['layers'][1] - 1}",
            f"{stage['weight_bytes'] / GIB:.3f} GiB of weights, {stage['kv_cache_bytes'] / GIB:.3f} GiB of KV cache, "
            f"{stage['total_bytes'] / GIB:.3f} GiB in all",
        )
        for stage in stages
    ]
    link = [
        ("sent to each other rank of a stage, per token", f"{figures['sent_bytes_per_token']:,} bytes"),
        ("passed from stage to stage, per token", f"{figures['passed_bytes_per_token']:,} bytes"),
        ("messages, per step", f"{figures['messages_per_step']:,}"),
        ("link", f"{figures['link_gbit']:g} Gbit/s, {figures['link_us']:g} µs (--link-gbit, --link-us)"),
    ]
    return {
        **({"each rank, stage by stage": by_stage} if len(stages) > 1 else {}),
        **({"what the ranks send each other": link} if ranks > 1 else {}),
        f"{plan.name} on {plan.backend.name}{whose}": [
            ("parameters", f"{figures['parameters']:,}{' in all ranks' if ranks > 1 else ''}"),
            ("weights", f"{gib('weight_bytes')} ({figures['weights']}{bits})"),
            ("workspace", gib("workspace_bytes")),
            ("KV cache", f"{gib('kv_cache_bytes')} ({figures['kv_dtype']}), {figures['kv_tokens']:,} tokens"),
            ("KV per token", f"{figures['kv_bytes_per_token']:,} bytes"),
            ("total", f"{gib('total_bytes')} of {gib('available_bytes')} free"),
        ],
        "sequences that fit at once": [
            (f"of {length:,} tokens", f"{count:,}") for length, count in figures["max_sequences"].items()
        ],
        "upper bounds, by limits measured now": [
            ("memory read", f"{figures['read_gb_s']:.1f} GB/s"),
            ("arithmetic", f"{figures['peak_gflop_s']:.0f} GFLOP/s"),
            ("decode, one sequence", f"{figures['decode_tok_s_bound']:.1f} tok/s"),
            (f"decode, {figures['batch_size']} sequences", f"{figures['batch_tok_s_bound']:.1f} tok/s"),
            (f"prefill of {figures['input_len']:,} tokens", f"{figures['prefill_tok_s_bound']:.0f} tok/s"),
            ("time to first token", f"{figures['first_token_s_bound'] * 1e3:.0f} ms"),
            (
                _step_name(figures),
                f"{figures['chunk_tokens_bound']:,} tokens of a prompt beside one sequence",
            ),
            ("prefill in such steps", f"{figures['chunk_tok_s_bound']:.0f} tok/s"),
            *_cost_rows(figures),
        ],
    }


def _cost_rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    if "cost_per_month" not in figures:
        return []
    return [
        (
            f"a million tokens, {figures['batch_size']} sequences, at least",
            f"{figures['cost_per_million_tokens_bound']:.4g}",
        ),
        ("this machine, a month", f"{figures['cost_per_month']:.4g}"),
    ]


COMMAND = Command(run, PlanOptions, arguments=("model",), uses=PLANNING)
