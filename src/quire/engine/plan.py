"""An engine before it is loaded: its model, its share of it, and how its memory is divided."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, cast

from msgspec.structs import replace as replaced

from quire.config import DeviceConfig, EngineConfig, ModelConfig
from quire.devices import registry as devices
from quire.devices.graph import widths
from quire.devices.protocol import (
    Arithmetic,
    Backend,
    FloatDtype,
    Graph,
    KVCache,
    KVDtype,
    KVSpec,
    Limits,
)
from quire.engine import registry
from quire.engine.directory import own_path
from quire.engine.source import find_files, for_divided
from quire.engine.stages import StagePlan, check_node, share_of, with_same_blocks
from quire.errors import ConfigError, ResourceError
from quire.lazy import Lazy
from quire.model.cost import Cost
from quire.model.info import ModelInfo
from quire.model.load import ModelFiles
from quire.model.loaded import ServedModel
from quire.model.shard import Shard
from quire.runtime.memory import MemoryNeed, MemoryPlan, plan_memory
from quire.weights.hub import local

if TYPE_CHECKING:
    from quire.engine import fitting, preview
    from quire.engine.feature import Joined
    from quire.flags import compilation
else:
    compilation = Lazy("quire.flags.compilation")
    fitting, preview = Lazy("quire.engine.fitting"), Lazy("quire.engine.preview")


def tapped(model: ServedModel, taps: tuple[int, ...]) -> Graph:
    """Record the model's graph, with the hidden states that a drafter reads."""
    return model.stage(taps=taps) if taps else model.graph


def device_of(config: EngineConfig, rank: int) -> DeviceConfig:
    """Return a rank's device options, with its share of its machine's threads. With Ray, --threads is each rank's."""
    parallel = config.parallel
    if parallel.distributed_executor_backend == "ray":
        return config.device
    index = rank - parallel.own_ranks.start
    return config.device.of_rank(index, parallel.ranks_per_node, devices.usable_threads())


def make_backend(device: DeviceConfig, model: ModelInfo | None = None) -> Backend:
    """Make the configured backend, or the one that a foreign model needs. ConfigError if these differ."""
    if model is None or not model.foreign:
        kind = device.backend, device.threads, device.isa, device.device
        made = None if model is None else model.directory
        graphs = device.enforce_eager, device.cudagraph_capture_sizes, device.max_cudagraph_capture_size
        if device.compilation_config is not None:
            graphs = compilation.read_graphs(device.compilation_config, *graphs)
        return devices.make_backend(*kind, device.batch_invariant, made, graphs, device.libraries)
    for option, value, own in (("backend", device.backend, ()), ("device", device.device, ("cpu",))):
        if value not in ("auto", *own):
            raise ConfigError(
                f"{model.spec.architecture} runs through transformers, not --{option} {value}: leave it out"
            )
    return devices.foreign.make_foreign_backend(device.threads)


@dataclass(frozen=True, slots=True)
class Need:
    """The bytes that a feature needs on a rank.

    `taps` are the layers whose output it reads. With `recomputes_last` the last token of a cached prefix is computed
    again. It drafts at most `most_draft` tokens.
    """

    weights: int = 0
    workspace: int = 0
    kv_per_token: int = 0
    taps: tuple[int, ...] = ()
    recomputes_last: bool = False
    most_draft: int = 0

    def __add__(self, other: Need) -> Need:
        return Need(
            self.weights + other.weights,
            self.workspace + other.workspace,
            self.kv_per_token + other.kv_per_token,
            self.taps + other.taps,
            self.recomputes_last or other.recomputes_last,
            max(self.most_draft, other.most_draft),
        )


@dataclass(frozen=True, slots=True)
class Planning:
    """A planned rank as features see it: an outline of its share, and the largest step."""

    config: EngineConfig
    model: ModelInfo
    backend: Backend
    share: ServedModel
    limits: Limits
    shard: Shard


class Planned(Protocol):
    """A feature that options ask for."""

    def need(self, planning: Planning) -> Need:
        """Return what the feature takes. ConfigError if it does not go with the model."""

    def join(self, engine: Joined) -> None:
        """Add it to the engine: see `quire.engine.feature.Feature`."""


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
    features: dict[str, Planned]
    need: Need
    shard: Shard
    stages: tuple[StagePlan, ...]

    def kv_cache(self) -> KVCache:
        """Make room for all sequences."""
        return self.backend.kv_cache(self.kv_spec, *self.memory.cache_sizes)

    def plan_ranks(self) -> None:
        """Tell the backend of those other ranks of the stage whose shares have shapes of their own."""
        outline, known = self.backend.outline(), set[str]()
        for rank in range(self.shard.size):
            own = share_of(self.config.parallel, rank, self.model)
            share = self.files.outline(outline, own)
            kv_spec = self.model.kv_spec(kv_dtype(self.config, self.model.dtype), own)
            graph = tapped(share, self.need.taps)
            shapes = repr((kv_spec, widths(graph, kv_spec)))
            if rank and shapes not in known:
                outline.workspace_bytes(graph, kv_spec, self.limits)
            known.add(shapes)

    @property
    def arithmetic(self) -> Arithmetic:
        """Return the arithmetic of most products."""
        scheme = self.model.quantized
        linear = None if scheme is None else scheme.linear
        return self.backend.arithmetic(self.model.dtype if linear is None else linear)


def plan_engine(config: EngineConfig, free: int | None = None) -> EnginePlan:
    """Read config and headers, and divide the memory. Allocates nothing. ConfigError if the model cannot fit.

    Weights of the hub are fetched once the model is known to fit. `free` are the bytes that each machine has for it, by
    default those that this one has.
    """
    model = config.model
    if model.model and local(model.model) is None:
        with preview.unfetched(model) as seen:
            if seen is not model:
                plan_files(replace(config, model=seen), None, free)
        own_path(model)
    return plan_files(config, None, free)


def plan_files(config: EngineConfig, files: ModelFiles | None, free: int | None = None) -> EnginePlan:
    """Plan as `plan_engine` does, for `files` in place of the configured ones."""
    files = files or find_files(config.model, config.lora.spare_tokens)
    model = files.info
    longest = _max_model_len(config.model, model)
    config = _for_whole_prompts(config, longest) if model.spec.bidirectional else config
    config = for_divided(config, files)
    parallel = config.parallel
    check_node(parallel)
    stages, shard = parallel.pipeline_parallel_size, share_of(parallel, 0, model)
    backend = make_backend(device_of(config, 0), model)
    if parallel.distributed_executor_backend != "ray":
        devices.check_ranks(config.device.device, config.device.backend, parallel.ranks_per_node)
    outline = backend.outline()
    sharing = parallel.ranks_per_node if backend.choices.shared_memory else 1
    available = (free or backend.free_memory()) // sharing
    budget, wanted = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    max_num_seqs = min(wanted, budget, model.limits.max_batch_size or wanted)
    slots = config.lora.slots if config.lora.enable_lora else 0
    rows = min(backend.choices.logit_rows, max_num_seqs)
    limits = Limits(budget, max_num_seqs, rows, slots, backend.choices.graphs)
    features = {
        name: cast("Planned", registry.load(name).make(config))
        for name, entry in registry.FEATURES.items()
        if entry.by_options(config)
    }
    dtype, planned, need = kv_dtype(config, model.dtype), list[StagePlan](), Need()
    for stage in range(stages):
        own = replaced(shard, stage=stage)
        share, kv_spec = files.outline(outline, own), model.kv_spec(dtype, own)
        planning = Planning(config, model, outline, share, limits, own)
        need = sum((feature.need(planning) for feature in features.values()), Need())
        if backend.places_blocks and shard.alone and not model.spec.bidirectional and not need.kv_per_token:
            kv_spec = kv_spec.divided()
        try:
            workspace = outline.workspace_bytes(tapped(share, need.taps), kv_spec, limits)
        except ConfigError as error:
            raise ConfigError(f"{model.spec.architecture}: {error}") from error
        memory_need = MemoryNeed(
            weights=share.weight_bytes + need.weights,
            workspace=workspace + need.workspace,
            kv_bytes_per_token=kv_spec.token_bytes(config.cache.block_size) + need.kv_per_token,
            max_model_len=longest,
            max_model_len_is_given=config.model.max_model_len is not None,
            max_num_seqs=max_num_seqs,
            shape=kv_spec.block_shape,
            budget=budget,
            bytes_per_state=kv_spec.bytes_per_state if kv_spec.bytes_per_state(0) else None,
            most_draft=need.most_draft,
        )
        try:
            memory = plan_memory(config.cache, memory_need, available)
        except ResourceError as error:
            more = fitting.advice(config, files, outline, memory_need, available)
            raise ResourceError(f"{error}{more}") from error
        planned.append(StagePlan(own, kv_spec, memory, share.cost))
    planned = with_same_blocks(planned)
    ends, name = planned[-1], config.model.model.rstrip("/") or model.directory.name
    kv, memory, cost = ends.kv_spec, ends.memory, ends.cost
    return EnginePlan(
        name, backend, model, files, kv, limits, memory, cost, config, features, need, shard, tuple(planned)
    )


def _for_whole_prompts(config: EngineConfig, longest: int) -> EngineConfig:
    """Make steps and cache hold the longest text as a whole, without prefix caching."""
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


def kv_dtype(config: EngineConfig, dtype: FloatDtype) -> KVDtype:
    return dtype if config.cache.kv_cache_dtype == "auto" else config.cache.kv_cache_dtype


def _max_model_len(config: ModelConfig, model: ModelInfo) -> int:
    longest = model.limits.max_seq_len or model.spec.max_position
    if config.disable_sliding_window:
        longest = min([longest, *model.spec.windows])
    if config.max_model_len is None:
        return longest
    if config.max_model_len > longest:
        made = "this engine was built" if model.limits.max_seq_len else "the model was made"
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is more than the {longest} positions {made} for"
        )
    return config.max_model_len
