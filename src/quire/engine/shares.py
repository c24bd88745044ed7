"""What the ranks of each pipeline stage hold: their share, its memory and its cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.config import EngineConfig
from quire.devices.protocol import Backend, KVSpec
from quire.errors import ConfigError
from quire.model.cost import Cost
from quire.model.info import ModelInfo
from quire.model.loaded import LoadedModel, ServedModel
from quire.model.pack import Packed, Packer, WeightTypes
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.embedding import Head
from quire.model.parts.source import Given
from quire.model.shard import WHOLE, Shard
from quire.model.spec import ModelShape
from quire.model.tensors import Tensors
from quire.parallel import ParallelConfig
from quire.runtime.memory import MemoryPlan
from quire.spec_decode.make import Drafter
from quire.weights.schemes import Kept


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The share of the first rank of a stage; the others hold as much or less."""

    shard: Shard
    kv_spec: KVSpec
    memory: MemoryPlan
    cost: Cost


def share_of(parallel: ParallelConfig, rank: int, model: ModelInfo) -> Shard:
    """The share of a rank. Checkpoints that are quantized already are cut by rows alone, which keeps their codes."""
    return Shard(
        rank=rank % parallel.tensor_parallel_size,
        size=parallel.tensor_parallel_size,
        stage=parallel.stage_of(rank),
        stages=parallel.pipeline_parallel_size,
        exact=parallel.exact_across_ranks or isinstance(model.quantized, Kept),
        whole_experts=parallel.enable_expert_parallel,
    )


def check_parallel(config: EngineConfig, shard: Shard, spec: ModelShape, drafts: bool) -> None:
    """ConfigError: a part of the engine does not work on several ranks. `drafts`: a model makes drafts."""
    node = config.parallel.node_rank
    if node:
        raise ConfigError(
            f"--node-rank {node}: the engine runs on machine 0; start the others by `quire serve`"
        )
    if shard.stages > 1 and drafts:
        raise ConfigError(
            "--pipeline-parallel-size: a model that drafts needs all layers of the target; leave out the draft model, "
            "or draft with --spec-method ngram or suffix"
        )
    for what, given in (
        ("--exact-across-ranks", config.parallel.exact_across_ranks),
        (
            "--tensor-parallel-size of such a model",
            isinstance(spec, DecoderConfig) and spec.division(shard).gathers,
        ),
    ):
        if given and config.lora.enable_lora:
            raise ConfigError(f"--enable-lora with {what} is not supported: leave out one of them")


def drafting_target(
    drafter: Drafter | None, model: ServedModel, backend: Backend, outline: bool = False
) -> ServedModel:
    """The model as its drafter sees it, which runs on the engine's own rank alone."""
    if drafter is None or not drafter.runs_model or not isinstance(model, LoadedModel):
        return model
    return _with_whole_head(model, backend, outline)


def _with_whole_head(model: LoadedModel, backend: Backend, outline: bool = False) -> LoadedModel:
    """The model for a drafter that runs on one rank: its head is whole, so that logits need no other rank.

    ConfigError: the head cannot be read again.
    """
    config = model.spec
    if model.shard.whole or config.head is None:
        return model
    tied = config.tied and not (config.head.bias or config.embedding.spare_tokens)
    if not tied and (model.names is None or (model.open is None and not outline)):
        raise ConfigError(
            f"{model.info.directory} is a built engine: serve the checkpoint to draft on several ranks"
        )
    if tied:
        head = Head(config.head, config.embedding, Given({}), WHOLE, model.decoder.table)
    else:
        types = WeightTypes.of(model.info.dtype, model.info.quantized)
        packer = Packer(None if model.open is None else model.open(), backend, types, outline)
        assert model.names is not None
        head = Head(config.head, config.embedding, Packed(Tensors(config, model.names), packer), WHOLE)
    return replace(model, decoder=model.decoder.with_head(head), shard=WHOLE)


def own_head_bytes(target: ServedModel, model: ServedModel) -> int:
    """Bytes of the head that a drafter's target has beside the rank's share."""
    if target is model or not isinstance(target, LoadedModel) or target.decoder.head is None:
        return 0
    head = target.decoder.head.weight
    return 0 if head is target.decoder.table else head.nbytes


def with_same_blocks(stages: Sequence[StagePlan]) -> list[StagePlan]:
    """All stages with the number of blocks that each has room for: a block holds the same tokens in all."""
    blocks = min(stage.memory.num_blocks for stage in stages)
    longest = min(stage.memory.max_model_len for stage in stages)
    return [
        replace(stage, memory=replace(stage.memory, num_blocks=blocks, max_model_len=longest))
        for stage in stages
    ]
