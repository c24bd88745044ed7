"""An engine before it is loaded: its model, its share of it, and how its memory is divided."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from msgspec.structs import replace as replaced

from quire.config import DeviceConfig, EngineConfig, ModelConfig, SpeculativeOptions
from quire.devices import registry
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
from quire.engine.adapted import adapter_slots, adapters_bytes
from quire.engine.shares import (
    StagePlan,
    check_parallel,
    drafting_target,
    own_head_bytes,
    share_of,
    with_same_blocks,
)
from quire.engine.source import find_files, for_divided
from quire.errors import ConfigError
from quire.model.cost import Cost
from quire.model.info import ModelInfo
from quire.model.load import ModelFiles
from quire.model.loaded import ServedModel
from quire.model.parts.decoder import DecoderConfig
from quire.model.shard import Shard
from quire.runtime.memory import MemoryNeed, MemoryPlan, plan_memory
from quire.runtime.trees import tree_blocks, with_trees
from quire.spec_decode.make import (
    WITHOUT_MODEL,
    Drafter,
    DraftNeed,
    find_drafter,
    plan_draft,
    verifier_of,
)
from quire.weights.hub import find_model

MAX_LOGIT_ROWS = 64  # rows of logits held at a time: 64 x 150k float32 are 38 MB


def speculative_options(config: EngineConfig) -> SpeculativeOptions | None:
    """How to draft. If the configured model is a speculator, it drafts unless another drafter is asked for."""
    options, model = config.speculation.options, config.model
    if options is not None and (options.model is not None or options.method in WITHOUT_MODEL):
        return options
    if model.model and verifier_of(find_model(model.model, model.revision, model.download_dir)) is not None:
        return msgspec.structs.replace(options or SpeculativeOptions(), model=model.model)
    return options


def tapped(model: ServedModel, taps: tuple[int, ...]) -> Graph:
    """The model's graph, with the hidden states that a drafter reads."""
    return model.stage(taps=taps) if taps else model.graph


def device_of(config: EngineConfig, rank: int) -> DeviceConfig:
    """The device options of a rank: its share of its machine's threads. With Ray, --threads are those of each."""
    parallel = config.parallel
    if parallel.distributed_executor_backend == "ray":
        return config.device
    index = rank - parallel.own_ranks.start
    return config.device.of_rank(index, parallel.ranks_per_node, registry.usable_threads())


def make_backend(device: DeviceConfig, model: ModelInfo | None = None) -> Backend:
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
    model: ModelInfo
    files: ModelFiles
    kv_spec: KVSpec
    limits: Limits
    memory: MemoryPlan
    cost: Cost
    config: EngineConfig
    drafter: Drafter | None
    draft: DraftNeed
    shard: Shard
    stages: tuple[StagePlan, ...]

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
        linear = None if scheme is None else scheme.linear
        return self.backend.arithmetic(self.model.dtype if linear is None else linear)


def plan_engine(config: EngineConfig) -> EnginePlan:
    """Read config and headers, and divide the memory. Allocates nothing. ConfigError if the model cannot fit."""
    files = find_files(config.model, config.lora.spare_tokens)
    model = files.info
    longest = _max_model_len(config.model, model)
    config = _for_whole_prompts(config, longest) if model.spec.bidirectional else config
    config = for_divided(config, files)
    parallel = config.parallel
    stages, shard = parallel.pipeline_parallel_size, share_of(parallel, 0, model)
    backend = make_backend(device_of(config, 0), model)
    outline = backend.outline()
    available = backend.free_memory() // parallel.ranks_per_node
    max_num_seqs = min(
        config.scheduler.max_num_seqs,
        config.scheduler.max_num_batched_tokens,
        model.limits.max_batch_size or config.scheduler.max_num_seqs,
    )
    slots = adapter_slots(config.lora)
    limits = Limits(
        config.scheduler.max_num_batched_tokens, max_num_seqs, min(MAX_LOGIT_ROWS, max_num_seqs), slots
    )
    sketch = files.outline(outline, shard)
    drafter = find_drafter(speculative_options(config), config.model.download_dir)
    check_parallel(config, shard, model.spec, drafter is not None and drafter.runs_model)
    target = drafting_target(drafter, sketch, outline, True)
    draft = plan_draft(drafter, outline, target, limits, config.cache.block_size)
    dtype, planned = kv_dtype(config, model.dtype), []
    for stage in range(stages):
        own, last = replaced(shard, stage=stage), stage == stages - 1
        drafts, share = (draft, sketch) if last else (DraftNeed(), files.outline(outline, own))
        kv_spec = model.kv_spec(dtype, own)
        if backend.places_blocks and shard.alone and not model.spec.bidirectional and not draft.kv_per_token:
            kv_spec = kv_spec.divided()
        own_tokens = tree_blocks(drafts.trees, config.cache.block_size) * config.cache.block_size
        need = MemoryNeed(
            weights=share.weight_bytes
            + drafts.weights
            + adapters_bytes(share, outline, config.lora, slots)
            + (own_head_bytes(target, share) if last else 0),
            workspace=outline.workspace_bytes(
                tapped(share, drafts.taps), kv_spec, with_trees(limits, drafts.trees)
            )
            + drafts.workspace
            + own_tokens * kv_spec.bytes_per_token,
            kv_bytes_per_token=kv_spec.bytes_per_token + drafts.kv_per_token,
            max_model_len=longest,
            max_model_len_is_given=config.model.max_model_len is not None,
            max_num_seqs=max_num_seqs,
            shape=kv_spec.block_shape,
            budget=config.scheduler.max_num_batched_tokens,
        )
        memory = plan_memory(config.cache, need, available)
        planned.append(StagePlan(own, kv_spec, memory, share.cost))
    planned = with_same_blocks(planned)
    ends, name = planned[-1], _name(config.model, model.directory)
    return EnginePlan(
        name,
        backend,
        model,
        files,
        ends.kv_spec,
        limits,
        ends.memory,
        ends.cost,
        config,
        drafter,
        draft,
        shard,
        tuple(planned),
    )


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


def _max_model_len(config: ModelConfig, model: ModelInfo) -> int:
    longest = model.limits.max_seq_len or model.spec.max_position
    if config.disable_sliding_window and isinstance(model.spec, DecoderConfig):
        longest = min([longest, *model.spec.windows])
    if config.max_model_len is None:
        return longest
    if config.max_model_len > longest:
        made = "this engine was built" if model.limits.max_seq_len else "the model was made"
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is more than the {longest} positions {made} for"
        )
    return config.max_model_len
