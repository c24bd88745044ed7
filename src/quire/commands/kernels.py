"""`quire kernels`: compiles what a model launches on a GPU, and lists what each kernel takes; or checks it here."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from quire.build import EVERYTHING
from quire.cli import Command, Options
from quire.config import EngineConfig, option
from quire.devices import registry
from quire.devices.artifacts import Builder, Checker
from quire.engine.plan import plan_engine, plan_files, tapped
from quire.errors import ConfigError
from quire.flags.uses import BUILDING, COMPUTE

LINE = "{:20} {:>9} {:>7} {:>10} {:>9} {:>8} {:>6}  {:16} {}"
TITLES = (
    "kernel",
    "registers",
    "spilled",
    "shared KiB",
    "cubin KiB",
    "programs",
    "narrow",
    "instruction",
    "signature",
)
DECIDED = frozenset({"block_size", "max_num_batched_tokens", "max_num_seqs"})


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions(Options):
    """Options of `quire kernels`."""

    target: str = option("sm_90", "The architecture to compile for, for example sm_80.")
    json: bool = option(False, "Print JSON instead of a table.")
    check: bool = option(False, "Run each kernel on this machine's GPU instead, and say which are wrong.")


def run(config: EngineConfig, options: KernelOptions) -> None:
    if options.check:
        check(config, options.json)
        return
    rows = compiled(config, options.target)
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print(LINE.format(*TITLES))
    for row in rows:
        kib = [f"{row[name] / 1024:.0f}" for name in ("shared_bytes", "cubin_bytes")]
        counts = (row[name] for name in ("programs", "narrow", "instruction"))
        signature = row["launch"].partition("(")[2]
        print(LINE.format(row["kernel"], row["registers"], row["spilled"], *kib, *counts, f"({signature}"))


def check(config: EngineConfig, as_json: bool) -> None:
    """Check the kernels of the configured model, and exit with status 1 if one is wrong."""
    device = config.device.device
    if registry.on_cpu(device, config.device.backend):
        raise ConfigError(
            "--check runs kernels, and there is no GPU: choose --device interpreter to try it here"
        )
    plan = plan_engine(config)
    if not isinstance(plan.backend, Checker):
        raise ConfigError(f"plain torch computes on --device {device}, so there are no kernels to check")
    graph = tapped(plan.files.load(plan.backend, plan.shard), plan.need.taps)
    found = plan.backend.check(graph, plan.kv_cache(), plan.limits)
    if as_json:
        print(json.dumps({name: {"values": right, "bits": kept} for name, (right, kept) in found.items()}))
    for name, (right, kept) in () if as_json else sorted(found.items()):
        print(f"{'right' if right else 'WRONG':6} {'bits kept' if kept else 'BITS LOST':10} {name}")
    if not all(right and kept for right, kept in found.values()):
        raise SystemExit(1)


def compiled(config: EngineConfig, target: str) -> list[dict[str, Any]]:
    """Compile the kernels of the configured model as a GPU serves it by default, and say what each takes."""
    device = replace(config.device, device=registry.selection.target_of("cuda", "auto", target))
    usual = registry.choices_of(device.device, "auto")
    cache = replace(config.cache, block_size=usual.block_size)
    tokens, seqs = usual.max_num_batched_tokens, usual.max_num_seqs
    scheduler = replace(config.scheduler, max_num_batched_tokens=tokens, max_num_seqs=seqs)
    plan = plan_files(replace(config, device=device, cache=cache, scheduler=scheduler), None, EVERYTHING)
    assert isinstance(plan.backend, Builder)
    return plan.backend.list_artifacts(plan.memory.block_size)


COMMAND = Command(
    run, KernelOptions, arguments=("model",), uses=(BUILDING - COMPUTE - DECIDED) | {"threads", "device"}
)
