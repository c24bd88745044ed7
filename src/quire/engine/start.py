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

import msgspec

from quire.config import DeviceConfig, EngineConfig, ModelConfig, SpeculativeOptions
from quire.devices import registry
from quire.devices.adapters import Adapter
from quire.devices.protocol import (
    Arithmetic,
    Backend,
    Executable,
    FloatDtype,
    Graph,
    KVCache,
    KVDtype,
    KVSpec,
    Limits,
)
from quire.engine.adapted import adapter_reader, adapter_slots, adapters_bytes
from quire.engine.adapters import AdapterArena
from quire.engine.core import EngineCore
from quire.engine.numa import bind
from quire.engine.ranks import RankedExecutable, RankedKVCache, Ranks
from quire.engine.rates import ASSUMED_GFLOPS, ASSUMED_READ_GBS, step_rates
from quire.engine.report import StartReport
from quire.engine.residence import Residence
from quire.engine.source import Loader, find_source, model_directory
from quire.engine.vocabulary import vocabulary_of
from quire.errors import ConfigError
from quire.files import read_json
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.vocabulary import Vocabulary
from quire.logits_processor import load_processors
from quire.model import load
from quire.model.cost import Cost
from quire.model.shard import Shard
from quire.model.spec import ArchSpec
from quire.program import Programs, Texts
from quire.runtime.inputs import InputBuilder
from quire.runtime.memory import MemoryNeed, MemoryPlan, plan_memory
from quire.runtime.runner import Runner
from quire.runtime.slots.adapters import AdapterPart
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
    WITHOUT_MODEL,
    Drafter,
    DraftNeed,
    find_drafter,
    make_drafting,
    plan_draft,
    verifier_of,
)
from quire.text.tokenizer import Tokenizer
from quire.types import ModelCard
from quire.weights.hub import find_model
from quire.weights.schemes import Kept, weights_name
from quire.weights.source import open_tokenizer

ServedModel = load.ServedModel
logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
MAX_LOGIT_ROWS = 64  # rows of logits held at a time: 64 x 150k float32 are 38 MB
# The keys of generation_config.json that Quire uses; the others configure searches that Quire does not do.
DEFAULT_PARAMS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Started:
    """A running engine, its model as callers need to know it, and the report of its start."""

    core: Programs[EngineCore]
    info: ModelCard
    report: StartReport
    grammars: GrammarCompiler
    close: Callable[[], None]  # ends its other processes


def speculative_options(config: EngineConfig) -> SpeculativeOptions | None:
    """How to draft. If the configured model is a speculator, it drafts unless another drafter is asked for."""
    options, model = config.speculation.options, config.model
    if options is not None and (options.model is not None or options.method in WITHOUT_MODEL):
        return options
    if model.model and verifier_of(find_model(model.model, model.revision, model.download_dir)) is not None:
        return msgspec.structs.replace(options or SpeculativeOptions(), model=model.model)
    return options


def tapped(model: load.ServedModel, taps: tuple[int, ...]) -> Graph:
    """The model's graph, with the hidden states that a drafter reads."""
    return model.stage(taps=taps) if taps and isinstance(model, load.LoadedModel) else model.graph


def make_backend(device: DeviceConfig, model: load.ModelInfo | None = None) -> Backend:
    """The configured backend, or the one that a foreign model needs. ConfigError if these differ."""
    if model is None or not model.foreign:
        return registry.make_backend(device.backend, device.threads, device.isa)
    if device.backend != "auto":
        raise ConfigError(
            f"{model.spec.architecture} runs through transformers, not --backend {device.backend}: leave it out"
        )
    return registry.make_foreign_backend(device.threads)


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """An engine before it is loaded: everything that decides its size."""

    name: str
    backend: Backend
    model: load.ModelInfo
    load: Loader
    kv_spec: KVSpec
    limits: Limits
    memory: MemoryPlan
    cost: Cost
    config: EngineConfig
    drafter: Drafter | None
    draft: DraftNeed
    shard: Shard

    def kv_cache(self) -> KVCache:
        """Room for all sequences, and for branches of drafts."""
        memory = self.memory
        own = tree_blocks(self.draft.trees, memory.block_size)
        return self.backend.kv_cache(self.kv_spec, memory.num_blocks + own, memory.block_size)

    def executable(self, model: ServedModel, kv: KVCache) -> Executable:
        return self.backend.compile(
            tapped(model, self.draft.taps), kv, with_trees(self.limits, self.draft.trees)
        )

    @property
    def arithmetic(self) -> Arithmetic:
        """The arithmetic of most products."""
        scheme = self.model.quantized
        if isinstance(scheme, Kept):
            return "int8" if scheme.activations == "int8" else "fp32"
        return self.backend.arithmetic(self.model.dtype if scheme is None else scheme.linear)


def plan_engine(config: EngineConfig) -> EnginePlan:
    """Read config and headers, and divide the memory. Allocates nothing. ConfigError if the model cannot fit."""
    model, loader = find_source(config.model)
    longest = _max_model_len(config.model, model)
    config = _for_whole_prompts(config, longest) if model.spec.bidirectional else config
    shard = Shard(0, config.device.tensor_parallel_size)
    backend = make_backend(config.device.of_rank(0, registry.usable_threads()), model)
    outline = backend.outline()
    available = backend.free_memory() // shard.size
    dtype = kv_dtype(config, model.dtype)
    kv_spec = model.kv_spec(dtype, shard)
    max_num_seqs = min(
        config.scheduler.max_num_seqs,
        config.scheduler.max_num_batched_tokens,
        model.limits.max_batch_size or config.scheduler.max_num_seqs,
    )
    slots = adapter_slots(config.lora)
    limits = Limits(
        config.scheduler.max_num_batched_tokens, max_num_seqs, min(MAX_LOGIT_ROWS, max_num_seqs), slots
    )
    sketch = loader(outline, False, shard)
    drafter = find_drafter(speculative_options(config), config.model.download_dir)
    if drafter is not None and not shard.whole and drafter.options.method not in WITHOUT_MODEL:
        raise ConfigError(
            "--tensor-parallel-size: models that draft are not divided yet; leave out the draft model, or draft with "
            "--spec-method ngram or suffix"
        )
    draft = plan_draft(drafter, outline, sketch, limits, config.cache.block_size)
    step_limits = with_trees(limits, draft.trees)
    own_tokens = tree_blocks(draft.trees, config.cache.block_size) * config.cache.block_size
    need = MemoryNeed(
        weights=sketch.weight_bytes + draft.weights + adapters_bytes(sketch, outline, config.lora, slots),
        workspace=outline.workspace_bytes(tapped(sketch, draft.taps), kv_spec, step_limits)
        + draft.workspace
        + own_tokens * kv_spec.bytes_per_token,
        kv_bytes_per_token=kv_spec.bytes_per_token + draft.kv_per_token,
        max_model_len=longest,
        max_model_len_is_given=config.model.max_model_len is not None,
        max_num_seqs=max_num_seqs,
    )
    memory = plan_memory(config.cache, need, available)
    name, cost = _name(config.model, model.directory), sketch.cost
    return EnginePlan(
        name, backend, model, loader, kv_spec, limits, memory, cost, config, drafter, draft, shard
    )


def start_core(config: EngineConfig) -> Started:
    """Plan memory, load the model, and make the engine ready for its first request."""
    started, model = begin_start(config)
    return finish_start(started, model)


def finish_start(started: Started, model: load.ServedModel) -> Started:
    with started.report.phase("checking the weights"):
        model.wait()
    started.report.log()
    return started


def begin_start(config: EngineConfig, processors: Sequence[type] = ()) -> tuple[Started, load.ServedModel]:
    """An engine that may step once its model's `wait` has returned. `processors` join the configured ones."""
    if config.device.tensor_parallel_size == 1:
        bind(config.device)
    report = StartReport()
    with report.phase("planning"):
        plan = plan_engine(config)
    backend, memory, spec, config = plan.backend, plan.memory, plan.model.spec, plan.config
    ranks = None if plan.shard.whole else _start_ranks(plan)
    slots = plan.limits.max_adapters
    with report.phase("packing the weights"):
        model = plan.load(backend, True, plan.shard if ranks is None else ranks.shard)
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
            model,
            sampler,
            plan.limits,
            memory.num_blocks,
            memory.block_size,
            max_blocks,
        )
        parts: list[SlotPart] = [
            sampling,
            grammar,
            processing,
            ScoringPart(sampler),
            PoolingPart(plan.model.pooling),
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
        runner = Runner(executable, caches, inputs, parts, plan.limits.max_logit_rows, trees)
        scheduler = Scheduler(
            replace(config.scheduler, max_num_seqs=plan.limits.max_seqs),
            memory.num_blocks,
            memory.block_size,
            memory.max_model_len,
            config.cache.enable_prefix_caching,
            whole_prompts=spec.bidirectional,
            recompute_last=drafting.reads_pairs,
            max_adapters=config.lora.max_loras if config.lora.enable_lora else None,
            rates=step_rates(
                plan.cost, plan.kv_spec, ASSUMED_READ_GBS, ASSUMED_GFLOPS * max(1, backend.threads)
            ),
        )
    if backend.caveat:
        logger.warning("%s %s", spec.architecture, backend.caveat)
    _describe(plan, report)
    core = EngineCore(scheduler, runner, grammars, depth=2 if config.scheduler.async_scheduling else 1)
    if ranks is None:  # ranks keep their memory while the engine sleeps
        core.residence = _residence(plan, runner, model, shares=drafting.cache is not None)
    core.trace_directory = config.device.trace_directory
    core.adapters = _make_arena(plan, core.residence, runner, inputs)
    tokenizer = partial(load_tokenizer, config.model) if has_tokenizer(config.model) else None
    texts = Texts(tokenizer, memory.max_model_len, config.cache.enable_prefix_caching)
    close = ranks.close if ranks is not None else _nothing
    return Started(Programs(core, texts), _card(plan), report, grammars, close), model


def _make_arena(
    plan: EnginePlan, residence: Residence[Any] | None, runner: Runner, inputs: InputBuilder
) -> AdapterArena[Adapter] | None:
    """Room for adapters, whose slots the runner learns by a part of its own; None if they are off."""
    if inputs.adapters_S is None or residence is None:
        return None
    reader = adapter_reader(lambda: residence.model, plan.backend, plan.config.lora)
    arena = AdapterArena(plan.limits.max_adapters, reader, runner.adapt)
    runner.parts.append(AdapterPart(inputs.adapters_S, arena.slot_of))
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
    device = config.device.of_rank(0, registry.usable_threads())
    ranks = Ranks(plan.shard.size)
    ranks.start(config, plan.limits, memory.num_blocks, memory.block_size)
    bind(device)  # only now, because the other ranks inherit it
    return ranks


def _residence(plan: EnginePlan, runner: Runner, model: ServedModel, shares: bool) -> Residence[Any]:
    """The memory that the engine gives back while it sleeps; without the weights if a drafter `shares` them."""
    load_again = (lambda: model) if shares else partial(_load_checked, plan)
    return Residence(runner, model, load_again, plan.kv_cache, plan.executable)


def _nothing() -> None:
    """There is nothing to close."""


def _load_checked(plan: EnginePlan) -> load.ServedModel:
    """The weights, read anew for an engine that gave them back."""
    model = plan.load(plan.backend, True)
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


def _for_whole_prompts(config: EngineConfig, longest: int) -> EngineConfig:
    """A configuration whose steps and cache hold the longest text as a whole, without prefix caching."""
    cache, scheduler = config.cache, config.scheduler
    tokens = max(scheduler.max_num_batched_tokens, longest)
    if cache.num_gpu_blocks_override is None and cache.kv_cache_memory_bytes is None:
        blocks = -(-tokens // cache.block_size) + min(scheduler.max_num_seqs, tokens)
        cache = replace(cache, num_gpu_blocks_override=blocks)
    return replace(
        config,
        cache=replace(cache, enable_prefix_caching=False),
        scheduler=replace(scheduler, max_num_batched_tokens=tokens),
    )


def _name(config: ModelConfig, directory: Path) -> str:
    return config.model.rstrip("/") or directory.name


def kv_dtype(config: EngineConfig, dtype: FloatDtype) -> KVDtype:
    return dtype if config.cache.kv_cache_dtype == "auto" else config.cache.kv_cache_dtype


def _max_model_len(config: ModelConfig, model: load.ModelInfo) -> int:
    longest = model.limits.max_seq_len or model.spec.max_position
    if config.disable_sliding_window and isinstance(model.spec, ArchSpec):
        longest = min([longest, *(window for window in model.spec.windows if window is not None)])
    if config.max_model_len is None:
        return longest
    if config.max_model_len > longest:
        made = "this engine was built" if model.limits.max_seq_len else "the model was made"
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is more than the {longest} positions {made} for"
        )
    return config.max_model_len


def _default_params(config: ModelConfig, found: load.ModelInfo) -> dict[str, Any]:
    """Sampling defaults from the model's generation_config.json, as vLLM takes them; "vllm" means none."""
    if config.generation_config == "vllm":
        return config.generation_changes
    generation = found.generation
    if config.generation_config != "auto":
        generation = read_json(Path(config.generation_config) / "generation_config.json")
    own = {name: generation[name] for name in DEFAULT_PARAMS if generation.get(name) is not None}
    return {**own, **config.generation_changes}
