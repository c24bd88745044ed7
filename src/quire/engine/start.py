"""From configuration to a running engine: model, memory plan, KV cache, scheduler, and the front that feeds it.

This module alone knows the parts of an engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace as replaced

from quire.config import EngineConfig, ModelConfig
from quire.devices.adapters import Adapter
from quire.engine.adapted import adapter_reader
from quire.engine.adapters import AdapterArena
from quire.engine.api import Queue
from quire.engine.compiling import GrammarGate
from quire.engine.core import EngineCore
from quire.engine.gates import Gate
from quire.engine.memory_release import MemoryRelease
from quire.engine.numa import bind, bind_rank
from quire.engine.plan import EnginePlan, device_of, plan_engine
from quire.engine.ranked import EarlierStages, RankedExecutable, RankedKVCache, RankedMemoryRelease
from quire.engine.ranks import Ranks
from quire.engine.rates import ASSUMED_GFLOPS, ASSUMED_READ_GBS, step_rates
from quire.engine.report import StartReport
from quire.engine.shares import (
    drafting_target,
)
from quire.engine.sleep import Sleeper
from quire.engine.source import agreement, model_directory
from quire.engine.trace import Tracer
from quire.engine.verbs import LoadAdapter, UnloadAdapter
from quire.engine.vocabulary import vocabulary_of
from quire.errors import ConfigError
from quire.files import read_json
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.vocabulary import Vocabulary
from quire.logits_processor import load_processors
from quire.model.info import ModelInfo
from quire.model.loaded import ServedModel
from quire.model.parts.decoder import DecoderConfig
from quire.model.shard import Shard
from quire.program import Programs, Texts
from quire.runtime.inputs import InputBuilder
from quire.runtime.runner import Runner
from quire.runtime.slots.grammar import GrammarPart
from quire.runtime.slots.pooling import PoolingPart
from quire.runtime.slots.processors import ProcessorPart
from quire.runtime.slots.protocol import SlotPart
from quire.runtime.slots.sampling import SamplingPart
from quire.runtime.slots.scoring import ScoringPart
from quire.runtime.slots.speculation import SpeculationPart
from quire.runtime.trees import make_trees, tree_blocks, with_trees
from quire.sched.scheduler import Scheduler
from quire.spec_decode.make import (
    make_drafting,
)
from quire.text.tokenizer import Tokenizer
from quire.types import ModelCard
from quire.weights.hub import find_model
from quire.weights.schemes import weights_name
from quire.weights.source import open_tokenizer

ServedModel = ServedModel
logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
# The keys of generation_config.json that Quire uses; the others configure searches that Quire does not do.
DEFAULT_PARAMS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Started:
    """A running engine, its model as callers need to know it, and the report of its start."""

    core: EngineCore
    info: ModelCard
    report: StartReport
    grammars: GrammarCompiler
    close: Callable[[], None]  # ends its other processes


def start_core(config: EngineConfig) -> Started:
    """Plan memory, load the model, and make the engine ready for its first request."""
    started, model = begin_start(config)
    return finish_start(started, model)


def finish_start(started: Started, model: ServedModel) -> Started:
    with started.report.phase("checking the weights"):
        model.wait()
    started.report.log()
    return started


def begin_start(
    config: EngineConfig,
    processors: Sequence[type] = (),
    tokenizer: Callable[[], Tokenizer | None] | None = None,
) -> tuple[Started, ServedModel]:
    """An engine that may step once its model's `wait` has returned.

    `processors` join the configured ones. `tokenizer` returns the model's, if the caller loads it too.
    """
    if config.parallel.ranks_per_node == 1:
        bind(config.device)
    report = StartReport()
    with report.phase("planning"):
        plan = plan_engine(config)
    backend, memory, spec, config = plan.backend, plan.memory, plan.model.spec, plan.config
    ranks = None if plan.shard.alone else _start_ranks(plan)
    slots = plan.limits.max_adapters
    with report.phase("packing the weights"):
        shard = plan.shard if ranks is None else replaced(plan.shard, peers=ranks.connection)
        model = plan.files.load(backend, shard)
    with report.phase("preparing to run"):
        kv = plan.kv_cache()
        executable = plan.executable(model, kv)
        if ranks is not None:
            ranks.wait_ready()
            executable, kv = RankedExecutable(executable, ranks, memory.block_size), RankedKVCache(kv, ranks)
        max_blocks, shape = -(-memory.max_model_len // memory.block_size), plan.draft.trees
        inputs = InputBuilder(plan.limits.max_seqs, max_blocks, shape.branches if shape else 0, slots > 0)
        trees = make_trees(shape, plan.limits.max_seqs, memory.num_blocks, memory.block_size, inputs)
        sampler = backend.sampler(spec.vocab_size)
        grammars = GrammarCompiler(lambda: load_vocabulary(config, spec.vocab_size, plan.model.eos_token_ids))
        classes = load_processors((*config.model.logits_processors, *processors))
        processing = ProcessorPart(sampler, classes, config.model.logprobs_mode, config)
        sampling = SamplingPart(sampler, processing)
        grammar = GrammarPart(sampling, spec.vocab_size, grammars, config.grammar.enable_jump_forward)
        drafting = make_drafting(
            plan.drafter,
            backend,
            drafting_target(plan.drafter, model, backend),
            sampler,
            plan.limits,
            memory.num_blocks,
            memory.block_size,
            max_blocks,
        )
        pooling = PoolingPart(plan.model.pooling)
        parts: list[SlotPart] = [
            sampling,
            grammar,
            processing,
            ScoringPart(sampler),
            pooling,
            SpeculationPart(
                drafting.proposer,
                drafting.limit,
                drafting.controller,
                inputs,
                grammar.count_allowed,
                trees,
            ),
        ]
        caches = [kv] if drafting.cache is None else [kv, drafting.cache]
        stages, earlier = config.parallel.pipeline_parallel_size, None
        if ranks is not None and stages > 1:
            earlier = EarlierStages(ranks, memory.block_size)
        runner = Runner(executable, caches, inputs, parts, plan.limits.max_logit_rows, trees, earlier)
        scheduler = _make_scheduler(plan, drafting.reads_pairs)
    if backend.caveat:
        logger.warning("%s %s", spec.architecture, backend.caveat)
    _describe(plan, report)
    released = _memory_release(plan, runner, model, drafting.cache is not None, ranks, shard)
    arena = _make_arena(plan, released, runner, inputs, pooling)
    core = _make_core(plan, scheduler, runner, released, arena, grammars, tokenizer)
    close = ranks.close if ranks is not None else _nothing
    return Started(core, _card(plan), report, grammars, close), model


def _make_core(
    plan: EnginePlan,
    scheduler: Scheduler,
    runner: Runner,
    released: MemoryRelease[Any],
    arena: AdapterArena[Adapter] | None,
    grammars: GrammarCompiler,
    tokenizer: Callable[[], Tokenizer | None] | None,
) -> EngineCore:
    config, memory = plan.config, plan.memory
    gates: list[Gate] = [GrammarGate(grammars)]
    if arena is not None:
        gates.insert(0, arena)
        released.after_load.append(arena.reload)
    if tokenizer is None and has_tokenizer(config.model):
        tokenizer = partial(load_tokenizer, config.model)

    def make_host(core: Queue) -> Programs:
        texts = Texts(tokenizer, memory.max_model_len, config.cache.enable_prefix_caching)
        return Programs(core, texts, grammars)

    depth = config.parallel.pipeline_parallel_size + config.scheduler.async_scheduling
    core = EngineCore(scheduler, runner, gates, make_host, depth)
    Sleeper(core, released)
    Tracer(core, config.device.trace_directory)
    if arena is not None:
        core.handlers |= {LoadAdapter: arena.load, UnloadAdapter: arena.unload}
    return core


def _make_scheduler(plan: EnginePlan, recompute_last: bool) -> Scheduler:
    config, memory, threads = plan.config, plan.memory, max(1, plan.backend.threads)
    return Scheduler(
        replace(config.scheduler, max_num_seqs=plan.limits.max_seqs),
        memory.num_blocks,
        memory.block_size,
        memory.max_model_len,
        config.cache.enable_prefix_caching,
        whole_prompts=plan.model.spec.bidirectional,
        recompute_last=recompute_last,
        max_adapters=config.lora.max_loras if config.lora.enable_lora else None,
        stages=config.parallel.pipeline_parallel_size,
        shape=plan.kv_spec.block_shape,
        rates=step_rates(plan.cost, plan.kv_spec, ASSUMED_READ_GBS, ASSUMED_GFLOPS * threads),
    )


def _make_arena(
    plan: EnginePlan,
    memory: MemoryRelease[Any],
    runner: Runner,
    inputs: InputBuilder,
    pooling: PoolingPart,
) -> AdapterArena[Adapter] | None:
    """Room for adapters, whose slots the inputs of steps name; None if they are off."""
    if inputs.adapters_S is None:
        return None
    held: dict[int, str] = {}  # digests of adapters with a pooling head, by slot

    def place(slot: int, adapter: Adapter | None) -> int:
        pooling.of_adapters.pop(held.pop(slot, ""), None)
        if adapter is not None and adapter.pooling is not None:
            held[slot] = adapter.digest
            pooling.of_adapters[adapter.digest] = adapter.pooling
        return runner.adapt(slot, adapter)

    reader = adapter_reader(lambda: memory.model, plan.backend, plan.config.lora)
    arena = AdapterArena(plan.limits.max_adapters, reader, place)
    inputs.slot_of = arena.slot_of
    return arena


def _describe(plan: EnginePlan, report: StartReport) -> None:
    """Enter the parts of the engine into its report."""
    backend = plan.backend
    report.model, report.backend, report.threads = plan.name, backend.name, backend.threads
    report.cost, report.kv_spec, report.arithmetic = plan.cost, plan.kv_spec, plan.arithmetic
    report.parameters, report.memory = plan.model.num_parameters, plan.memory
    report.dtype, report.kv_dtype = weights_name(plan.model.quantized, plan.model.dtype), plan.kv_spec.dtype


def _card(plan: EnginePlan) -> ModelCard:
    """The model as its callers see it."""
    memory, spec, config = plan.memory, plan.model.spec, plan.config
    most, head = config.model.max_logprobs, plan.model.pooling
    return ModelCard(
        name=plan.name,
        max_model_len=memory.max_model_len,
        max_input_len=plan.model.limits.max_input_len,
        vocab_size=spec.vocab_size,
        eos_token_ids=plan.model.eos_token_ids,
        max_logprobs=most if most >= 0 else spec.vocab_size,
        spare_tokens=config.lora.spare_tokens,
        defaults=_default_params(config.model, plan.model),
        generates=spec.has_head and not spec.bidirectional,
        pooling=config.model.pooling or (None if head is None else head.rows),
        scores=None if head is None else head.scores,
        labels=() if head is None else head.labels,
        segment_size=spec.vocab_size // spec.segments if spec.segments > 1 else 0,
        num_parameters=plan.model.num_parameters,
        weight_bytes=memory.weights,
    )


def _start_ranks(plan: EnginePlan) -> Ranks:
    config, memory = plan.config, plan.memory
    spec, fingerprint = plan.model.spec, plan.backend.fingerprint
    if not isinstance(spec, DecoderConfig):
        raise ConfigError("a model that runs through transformers cannot be divided among ranks")
    ranks = Ranks(config, spec.stream_width, plan.limits, agreement(config, plan.model, fingerprint))
    branches = tree_blocks(plan.draft.trees, memory.block_size)
    limits, taps = with_trees(plan.limits, plan.draft.trees), plan.draft.taps
    ranks.start(limits, memory.num_blocks + branches, memory.block_size, taps)
    bind_rank(
        device_of(config, 0), 0, config.parallel.ranks_per_node
    )  # now that the others, who inherit it, run
    return ranks


def _memory_release(
    plan: EnginePlan, runner: Runner, model: ServedModel, shares: bool, ranks: Ranks | None, shard: Shard
) -> MemoryRelease[Any]:
    """The memory that the engine gives back while it sleeps; without the weights if a drafter `shares` them."""
    load_again = (lambda: model) if shares else partial(_load_checked, plan, shard)
    if ranks is None:
        return MemoryRelease(runner, model, load_again, plan.kv_cache, plan.executable)
    return RankedMemoryRelease(
        ranks,
        runner,
        model,
        load_again,
        lambda: RankedKVCache(plan.kv_cache(), ranks),
        lambda model, kv: RankedExecutable(plan.executable(model, kv.own), ranks, plan.memory.block_size),
    )


def _nothing() -> None:
    """There is nothing to close."""


def _load_checked(plan: EnginePlan, shard: Shard) -> ServedModel:
    """The weights, read anew for an engine that gave them back."""
    model = plan.files.load(plan.backend, shard)
    model.wait()
    return model


def load_tokenizer(config: ModelConfig) -> Tokenizer:
    """The model's tokenizer, or the one configured in its place."""
    if config.tokenizer:
        revision, token = config.tokenizer_revision, config.hf_token
        return open_tokenizer(find_model(config.tokenizer, revision, config.download_dir, False, token))
    return open_tokenizer(model_directory(config))


def has_tokenizer(config: ModelConfig) -> bool:
    """Whether prompts may be texts. Dummy weights do without a tokenizer if the directory holds none."""
    if config.skip_tokenizer_init or config.tokenizer or config.load_format != "dummy":
        return not config.skip_tokenizer_init
    directory = model_directory(config)
    found = any((directory / name).is_file() for name in TOKENIZER_FILES)
    if not found:
        logger.warning("%s holds no tokenizer: prompts and outputs are token ids", directory)
    return found


def load_vocabulary(config: EngineConfig, vocab_size: int, ends: tuple[int, ...]) -> Vocabulary:
    """The tokenizer's vocabulary, as grammars need it."""
    return vocabulary_of(load_tokenizer(config.model), vocab_size, ends)


def _default_params(config: ModelConfig, found: ModelInfo) -> dict[str, Any]:
    """Sampling defaults from the model's generation_config.json, as vLLM takes them; "vllm" means none."""
    if config.generation_config == "vllm":
        return config.generation_changes
    generation = found.generation
    if config.generation_config != "auto":
        generation = read_json(Path(config.generation_config) / "generation_config.json")
    own = {name: generation[name] for name in DEFAULT_PARAMS if generation.get(name) is not None}
    return {**own, **config.generation_changes}
