"""Plans the ranks of each pipeline stage: their share, its memory and its cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.devices.protocol import KVSpec
from quire.errors import ConfigError
from quire.model.cost import Cost
from quire.model.info import ModelInfo
from quire.model.shard import Shard
from quire.ranks.options import ParallelConfig
from quire.runtime.memory import MemoryPlan
from quire.weights.schemes import Kept


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The plan of a stage's first rank; the others hold as much or less."""

    shard: Shard
    kv_spec: KVSpec
    memory: MemoryPlan
    cost: Cost


def share_of(parallel: ParallelConfig, rank: int, model: ModelInfo) -> Shard:
    """Choose the share of a rank. Quantized checkpoints are cut by rows alone, which keeps their codes."""
    return Shard(
        rank=rank % parallel.tensor_parallel_size,
        size=parallel.tensor_parallel_size,
        stage=parallel.stage_of(rank),
        stages=parallel.pipeline_parallel_size,
        exact=parallel.exact_across_ranks or isinstance(model.quantized, Kept),
        whole_experts=parallel.enable_expert_parallel,
    )


def check_node(parallel: ParallelConfig) -> None:
    """Raise ConfigError unless this machine is the one that the engine runs on."""
    if parallel.node_rank:
        raise ConfigError(
            f"--node-rank {parallel.node_rank}: the engine runs on machine 0; start the others by `quire serve`"
        )


def with_same_blocks(stages: Sequence[StagePlan]) -> list[StagePlan]:
    """Give all stages the blocks and rows of states that each has room for: these hold the same tokens in all."""
    blocks = min(stage.memory.num_blocks for stage in stages)
    longest = min(stage.memory.max_model_len for stage in stages)
    found = [stage.memory.rows for stage in stages if stage.memory.rows is not None]
    rows = found[0].common(found) if found else None
    return [
        replace(stage, memory=replace(stage.memory, num_blocks=blocks, max_model_len=longest, rows=rows))
        for stage in stages
    ]
