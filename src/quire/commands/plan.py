"""`quire plan`: the memory that a model takes, how many sequences fit, and the speed that this machine allows.

Reads the config and the tensor headers only. Speeds are upper bounds: what a step reads and computes (`model/cost.py`)
beside the limits of the machine, given or measured now. For a config.json alone it prints what does not depend on the
machine.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from quire.bench.report import cost_per_million, cost_per_month
from quire.cli import Command, Options
from quire.config import EngineConfig, option
from quire.devices.choices import read_limits
from quire.devices.protocol import MachineLimits
from quire.engine import garbage
from quire.engine.card import step_rates
from quire.engine.plan import EnginePlan, plan_engine, plan_files
from quire.engine.preview import unfetched
from quire.engine.source import quantized_weights
from quire.errors import ConfigError, ResourceError
from quire.flags.uses import PLANNING
from quire.meter import in_bytes
from quire.model.outline import ConfigFiles
from quire.runtime.memory import GIB, MemoryPlan
from quire.runtime.states import count_sequences
from quire.sched.times import StepTimes, StepWork
from quire.serve.options import TARGET_STEP_TIME
from quire.weights.gguf.choice import all_parts
from quire.weights.readers import Quantization
from quire.weights.readers.planned import USUAL
from quire.weights.schemes import FLOAT_KINDS, METHODS, weights_name
from quire.weights.source import quantization_method

BOUNDLESS = 1 << 60  # bytes
ROOM = (
    "kv_cache_bytes", "total_bytes", "available_bytes", "kv_tokens", "max_sequences", "running_sequences", "snapshots"
)  # fmt: skip
"""ROOM names the figures that depend on the free memory."""
ROOMS = {"gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override"}
WITHOUT_FILES = frozenset(
    {
        "download_dir", "gpu_memory_utilization", "hf_overrides", "hf_token", "kv_cache_memory_bytes", "load_format",
        "model_impl", "nnodes", "num_gpu_blocks_override", "revision", "rope_scaling", "rope_theta",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(Options):
    """Options of `quire plan`."""

    input_len: int = option(1024, "Prompt length to plan for, in tokens.", low=1)
    output_len: int = option(256, "Output length to plan for, in tokens.", low=1)
    batch_size: int = option(8, "Sequences decoded together, for the second decode bound.", low=1)
    price_per_hour: float | None = option(None, "Price of a machine: adds bounds of the cost.", low=0)
    memory_gb: float | None = option(
        None, "Memory of the machine to plan for, in GB; default is what is free here.", low=0.001
    )
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


def run(config: EngineConfig, options: PlanOptions) -> None:
    shortage: ResourceError | None = None
    disk: dict[str, int] = {}
    garbage.collect_rarely()  # an outline has hundreds of thousands of objects, and no cycles
    free = None if options.memory_gb is None else int(options.memory_gb * 1e9)
    with unfetched(config.model) as seen:
        looked_at = replace(config, model=seen)
        plan_for = plan_engine if not options.config else partial(plan_config, Path(options.config))
        try:
            plan = plan_for(looked_at, free)
        except ResourceError as error:
            plan, shortage = plan_for(looked_at, BOUNDLESS), error
        if not options.config:
            disk = disk_bytes(plan.model.directory, seen is config.model)
            plan = replace(plan, name=config.model.model or plan.name)
        plan = replace(plan, config=replace(plan.config, model=config.model))
    given = read_limits(config.device.machine_limits)
    if given is None:
        limits = plan.backend.measure_limits(plan.arithmetic)
    else:
        limits = MachineLimits(given[0] / 1e9, given[1] / 1e9, plan.arithmetic, plan.backend.threads)
    figures = describe(plan, limits, options) | disk
    bounded = shortage is None and (not options.config or free is not None)
    if not bounded:
        figures = _without_room(figures)
    _show(figures, _tables(figures, plan, bounded), options.json)
    if shortage is not None:
        raise shortage


def _show(figures: dict[str, Any], tables: dict[str, list[tuple[str, str]]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(figures, indent=1))
        return
    console = Console()
    for title, rows in tables.items():
        table = Table("", "", title=title, title_justify="left", show_header=False)
        for row in rows:
            table.add_row(*row)
        console.print(table)


def disk_bytes(place: Path, here: bool) -> dict[str, int]:
    """Count the bytes of weights in a directory or a GGUF file; in a look ahead, links are here."""
    if place.is_file():
        files = [place.with_name(name) for name in all_parts(place.name)]
    else:
        files = [file for file in place.iterdir() if file.suffix in (".safetensors", ".bin", ".pt")]
    sizes = {file: file.stat().st_size for file in files}
    present = sum(size for file, size in sizes.items() if here or file.is_symlink())
    return {"disk_bytes": sum(sizes.values()), "disk_bytes_here": present}


def plan_config(path: Path, config: EngineConfig, free: int | None = None) -> EnginePlan:
    """Plan a config.json, as if memory had no bound unless `free` bytes are.

    A method of --quantization that floats are not rounded by is planned with its usual settings. ModelError names a
    field that is not understood.
    """
    if config.model.model:
        raise ConfigError(f"--config takes the place of a model; leave out {config.model.model}")
    model, assumed = config.model, None
    usual = USUAL.get(model.quantization, USUAL.get(METHODS.get(model.quantization, "")))
    if usual is not None and model.quantization not in FLOAT_KINDS and quantization_method(path) is None:
        assumed = Quantization(METHODS[model.quantization], usual, str(path))
        model = replace(model, quantization="auto")
    files = ConfigFiles(path, model.dtype, quantized_weights(model, path), model.architecture, assumed)
    return replace(plan_files(replace(config, model=model), files, free or BOUNDLESS), name=str(path))


def _without_room(figures: dict[str, Any]) -> dict[str, Any]:
    """Leave out the figures that depend on the free memory."""
    stages = [{k: v for k, v in stage.items() if k not in ROOM} for stage in figures["stages"]]
    found = {k: v for k, v in figures.items() if k not in ROOM}
    return {**found, "stages": stages, "sequence_bytes": found["max_model_len"] * found["kv_bytes_per_token"]}


def describe(plan: EnginePlan, limits: MachineLimits, options: PlanOptions) -> dict[str, Any]:
    """Compute all figures by name: bytes, tokens, sequences, bounds in tokens per second."""
    memory, model = plan.memory, plan.model
    kv_bytes = plan.kv_spec.token_bytes(memory.block_size)
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
        **_state_figures(memory),
        "max_sequences": {n: count_sequences(memory, n) for n in _lengths(length, memory)},
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
        **_costs(options.price_per_hour, plan.config.parallel.nnodes, batch_rate),
    }


def _state_figures(memory: MemoryPlan) -> dict[str, int]:
    """Compute what recurrent states take, if the model has such."""
    rows = memory.rows
    if rows is None:
        return {}
    return {
        "state_bytes_per_sequence": memory.state_bytes,
        "running_sequences": rows.num_running,
        "snapshots": rows.num_snapshots,
    }


def _state_rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    if "state_bytes_per_sequence" not in figures:
        return []
    row, kv = figures["state_bytes_per_sequence"], figures["kv_bytes_per_token"]
    same = f", as much as the KV of {row // kv:,} tokens" if kv else ""
    shown = [("recurrent state, and a snapshot of it", f"{row:,} bytes per sequence{same}")]
    if "snapshots" in figures:
        shown.append(
            (
                "sequences at once, and snapshots",
                f"{figures['running_sequences']:,}, {figures['snapshots']:,}",
            )
        )
    return shown


def _costs(price: float | None, machines: int, rate: float) -> dict[str, float]:
    """Bound the cost of a million tokens at this rate from below, and add the machines' per month, if priced."""
    if price is None:
        return {}
    return {
        "cost_per_million_tokens_bound": cost_per_million(price * machines, rate),
        "cost_per_month": cost_per_month(price * machines),
    }


def _parallel(plan: EnginePlan, options: PlanOptions) -> dict[str, Any]:
    """Compute the figures of each rank, stage by stage, and what the ranks send each other."""
    spec, parallel = plan.model.spec, plan.config.parallel
    stages: list[dict[str, Any]] = [
        {
            "layers": [spec.stage(stage.shard).start, spec.stage(stage.shard).stop],
            "weight_bytes": stage.memory.weights,
            "workspace_bytes": stage.memory.workspace,
            "kv_bytes_per_token": stage.kv_spec.token_bytes(stage.memory.block_size),
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


def _lengths(wanted: int, memory: MemoryPlan) -> list[int]:
    """Choose sequence lengths to show: powers of four up to the model's length, and the one asked for."""
    longest = memory.max_model_len
    powers = [*(4**k for k in range(4, 12)), *((8192, 32768) if memory.rows else ())]
    return sorted({*(n for n in powers if n < longest), min(wanted, longest), longest})


def _step_name(figures: dict[str, Any]) -> str:
    target = figures["target_step_ms"]
    return (
        f"a step of {target:.0f} ms (--target-step-time)" if target else "a step (--max-num-batched-tokens)"
    )


def _tables(figures: dict[str, Any], plan: EnginePlan, bounded: bool) -> dict[str, list[tuple[str, str]]]:
    """Lay out the figures; those of the room that the free memory leaves only if it is `bounded`."""

    def gib(name: str) -> str:
        return f"{figures[name] / GIB:.3f} GiB"

    size, stages = figures["tensor_parallel_size"], figures["stages"]
    ranks = size * figures["pipeline_parallel_size"]
    whose = f", each of {ranks} ranks" if ranks > 1 else ""
    if len(stages) > 1:
        whose = f", each of {size} rank{'s' if size > 1 else ''} of the last of {len(stages)} stages"
    bits = f", {8 * figures['weight_bytes'] / figures['parameters']:.1f} bits each" if ranks == 1 else ""
    by_stage = [
        (
            f"layers {stage['layers'][0]} to {stage['layers'][1] - 1}",
            f"{stage['weight_bytes'] / GIB:.3f} GiB of weights"
            + (
                f", {stage['kv_cache_bytes'] / GIB:.3f} GiB of KV cache, {stage['total_bytes'] / GIB:.3f} GiB in all"
                if bounded
                else f", {stage['kv_bytes_per_token']:,} bytes of KV per token"
            ),
        )
        for stage in stages
    ]
    link = [
        ("sent to each other rank of a stage, per token", f"{figures['sent_bytes_per_token']:,} bytes"),
        ("passed from stage to stage, per token", f"{figures['passed_bytes_per_token']:,} bytes"),
        ("messages, per step", f"{figures['messages_per_step']:,}"),
        ("link", f"{figures['link_gbit']:g} Gbit/s, {figures['link_us']:g} µs (--link-gbit, --link-us)"),
    ]
    if bounded:
        room = [
            ("KV cache", f"{gib('kv_cache_bytes')}, {figures['kv_tokens']:,} tokens"),
            ("total", f"{gib('total_bytes')} of {gib('available_bytes')} free"),
        ]
        most = figures["max_sequences"].items()
        fitting = {"sequences that fit at once": [(f"of {n:,} tokens", f"{count:,}") for n, count in most]}
    else:
        batch = figures["batch_size"] * figures["sequence_len"] * figures["kv_bytes_per_token"]
        room = [
            (f"KV of {figures['max_model_len']:,} tokens", gib("sequence_bytes")),
            (
                f"KV of {figures['batch_size']} sequences of {figures['sequence_len']:,} tokens",
                f"{batch / GIB:.3f} GiB",
            ),
        ]
        fitting = {}
    told = "given" if read_limits(plan.config.device.machine_limits) else "measured now"
    return {
        **({"each rank, stage by stage": by_stage} if len(stages) > 1 else {}),
        **({"what the ranks send each other": link} if ranks > 1 else {}),
        f"{plan.name} on {plan.backend.name}{whose}": [
            ("parameters", f"{figures['parameters']:,}{' in all ranks' if ranks > 1 else ''}"),
            *([("on disk", _on_disk(figures))] if "disk_bytes" in figures else []),
            ("weights", f"{gib('weight_bytes')} ({figures['weights']}{bits})"),
            ("workspace", gib("workspace_bytes")),
            ("KV per token", f"{figures['kv_bytes_per_token']:,} bytes ({figures['kv_dtype']})"),
            *_state_rows(figures),
            *room,
        ],
        **fitting,
        f"upper bounds, by limits {told}": [
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


def _on_disk(figures: dict[str, Any]) -> str:
    here, size = figures["disk_bytes_here"], figures["disk_bytes"]
    return f"{in_bytes(size)}, {'all' if here == size else in_bytes(here)} here"


def _cost_rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    if "cost_per_month" not in figures:
        return []
    return [
        (
            f"a million tokens, {figures['batch_size']} sequences, at least",
            f"{figures['cost_per_million_tokens_bound']:.4g}",
        ),
        ("the machine, or all of --nnodes, a month", f"{figures['cost_per_month']:.4g}"),
    ]


def _idle(options: PlanOptions) -> Collection[str]:
    """Name what means nothing beside --config: where files are, and how much of the free memory to take."""
    if not options.config:
        return ()
    return WITHOUT_FILES if options.memory_gb is None else WITHOUT_FILES - ROOMS


COMMAND = Command(run, PlanOptions, arguments=("model",), uses=PLANNING, idle=_idle)
