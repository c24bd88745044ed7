"""Starts an engine from its configuration: the spine's parts, then the features that options ask for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from quire.config import EngineConfig
from quire.devices.choices import read_limits
from quire.engine import registry
from quire.engine.card import card_of, step_rates
from quire.engine.core import EngineCore
from quire.engine.directory import has_tokenizer, load_tokenizer
from quire.engine.feature import Features, Joined
from quire.engine.plan import EnginePlan, plan_engine
from quire.engine.report import StartReport
from quire.engine.undivided import Undivided
from quire.engine.verbs import Identify, Result, Sleep, StartProfile, StopProfile, Verb, WakeUp
from quire.lazy import Lazy
from quire.model.loaded import ServedModel
from quire.progress import progress
from quire.runtime.inputs import InputBuilder
from quire.runtime.memory import GIB
from quire.runtime.runner import Runner
from quire.runtime.slots.sampling import SamplingPart
from quire.runtime.slots.scoring import ScoringPart
from quire.sched.scheduler import Scheduler
from quire.types import ModelCard
from quire.weights.schemes import weights_name

if TYPE_CHECKING:
    from quire.engine import identity, sleep, trace
    from quire.runtime.slots.protocol import SlotPart
    from quire.text.tokenizer import Tokenizer
else:
    sleep, trace = Lazy("quire.engine.sleep"), Lazy("quire.engine.trace")
    identity = Lazy("quire.engine.identity")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Started:
    """A running engine, its model as callers need to know it, and the report of its start."""

    core: EngineCore
    info: ModelCard
    report: StartReport
    features: Features
    close: Callable[[], None]  # ends its other processes


def start_core(config: EngineConfig) -> Started:
    """Plan memory, load the model, and make the engine ready for its first request."""
    started, model = begin_start(config)
    return finish_start(started, model)


def finish_start(started: Started, model: ServedModel) -> Started:
    """Wait for the weights, and log the report."""
    with started.report.phase("checking the weights"), progress("checking the weights"):
        model.wait()
    started.report.log()
    return started


def begin_start(
    config: EngineConfig, processors: Sequence[type] = (), tokenizer: Callable[[], Tokenizer] | None = None
) -> tuple[Started, ServedModel]:
    """Make an engine that may step once its model's `wait` has returned.

    `processors` join the configured ones. `tokenizer` returns the model's, if the caller loads it too.
    """
    if config.device.binds_cores and config.parallel.ranks_per_node == 1:
        registry.of_ranks("numa").bind(config.device)
    report = StartReport()
    with report.phase("planning"):
        plan = plan_engine(config)
    config, memory, limits, spec = plan.config, plan.memory, plan.limits, plan.model.spec
    if config.device.machine_limits == "measure":
        with report.phase("measuring the machine"):
            measured = plan.backend.measure_limits(plan.arithmetic)
        known: tuple[float, float] | None = (measured.read_gbs * 1e9, measured.peak_gflops * 1e9)
    else:
        known = read_limits(config.device.machine_limits)
    alone = plan.shard.alone
    division: Undivided = Undivided(plan) if alone else registry.of_ranks("division").Division(plan)
    with report.phase("packing the weights"):
        logger.info("loading %s from %s, %.2f GiB", plan.name, plan.model.directory, memory.weights / GIB)
        with progress(f"loading {plan.name}", memory.weights) as told:
            model = division.load(told)
    with report.phase("preparing to run"):
        kv, launches = division.kv_cache(), plan.backend.choices.launches
        executable = division.executable(model, kv)
        division.wait_ready()
        inputs = InputBuilder(limits.max_seqs, memory.max_blocks, limits.max_adapters > 0, launches)
        sampler = plan.backend.sampler(spec.vocab_size)
        sampling = SamplingPart(sampler)
        slot_parts: list[SlotPart] = [sampling, ScoringPart(sampler)]
        by_division = division.earlier, launches, division.intact
        runner = Runner(executable, [kv], inputs, slot_parts, limits.max_logit_rows, *by_division)
        released = division.memory_release(runner, model)
        stages = config.parallel.pipeline_parallel_size
        core = EngineCore(_make_scheduler(plan, known), runner, stages + config.scheduler.async_scheduling)
        core.on_idle = runner.prepare if plan.backend.choices.prepares and alone else bool
        _obey(core, (StartProfile, StopProfile), lambda: trace.Tracer(core, config.device.trace_directory))
        _obey(core, (Sleep, WakeUp), lambda: sleep.Sleeper(core, released))
        _obey(core, (Identify,), lambda: identity.Identifier(core, plan))
        if tokenizer is None and has_tokenizer(config.model):
            tokenizer = partial(load_tokenizer, config.model)
        features = Features(config, plan.features)
        fitted = None if tokenizer is None else partial(_fitted, tokenizer, spec.vocab_size)
        engine = Joined(
            plan, model, sampler, sampling, inputs, runner, released, core, features, fitted, tuple(processors),
        )  # fmt: skip
        features.begin(engine)
        if processors:
            features.join("processors")
    if plan.backend.caveat:
        logger.warning("%s %s", spec.architecture, plan.backend.caveat)
    _describe(plan, report)
    return Started(core, card_of(plan), report, features, division.close), model


def _obey(core: EngineCore, verbs: Sequence[type], make: Callable[[], object]) -> None:
    """Have the core obey verbs by what `make` adds to its handlers, made when the first comes."""

    def first(verb: Verb) -> Result | Future[str]:
        make()
        return core.do(verb)

    core.handlers |= dict.fromkeys(verbs, first)


def _make_scheduler(plan: EnginePlan, known: tuple[float, float] | None) -> Scheduler:
    config, memory, choices = plan.config, plan.memory, plan.backend.choices
    return Scheduler(
        replace(config.scheduler, max_num_seqs=plan.limits.max_seqs),
        memory.num_blocks,
        memory.block_size,
        memory.max_model_len,
        config.cache.enable_prefix_caching,
        whole_prompts=plan.model.spec.bidirectional,
        recompute_last=plan.need.recomputes_last,
        max_adapters=config.lora.most_at_once if config.lora.enable_lora else None,
        stages=config.parallel.pipeline_parallel_size,
        shape=plan.kv_spec.block_shape,
        rows=memory.rows,
        rates=replace(step_rates(plan.cost, plan.kv_spec, choices.read_gbs, choices.gflops), limits=known),
    )


def _fitted(tokenizer: Callable[[], Tokenizer], rows: int) -> Tokenizer:
    return tokenizer().fit(rows)


def _describe(plan: EnginePlan, report: StartReport) -> None:
    """Enter the parts of the engine into its report."""
    backend = plan.backend
    report.model, report.backend, report.threads = plan.name, backend.name, backend.threads
    report.cost, report.kv_spec, report.arithmetic = plan.cost, plan.kv_spec, plan.arithmetic
    report.parameters, report.memory = plan.model.num_parameters, plan.memory
    report.dtype, report.kv_dtype = weights_name(plan.model.quantized, plan.model.dtype), plan.kv_spec.dtype
