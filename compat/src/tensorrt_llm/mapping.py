"""How a model is divided: TensorRT-LLM's numbers of ranks."""

from dataclasses import dataclass

from quire.errors import ConfigError


@dataclass(slots=True)
class Mapping:
    """`tp_size` ranks divide each layer. An engine's stages are chosen when it serves, so `pp_size` is 1."""

    world_size: int = 1
    rank: int = 0
    gpus_per_node: int = 8
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    moe_tp_size: int = -1
    moe_ep_size: int = -1

    def __post_init__(self) -> None:
        for name in ("pp_size", "cp_size"):
            if getattr(self, name) != 1:
                raise ConfigError(f"Mapping: {name} must be 1, got {getattr(self, name)}; use tp_size")
        if self.world_size != self.tp_size:
            raise ConfigError(f"Mapping: world_size {self.world_size} must equal tp_size {self.tp_size}")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"Mapping: there is no rank {self.rank} of {self.world_size}")

    @property
    def tp_rank(self) -> int:
        return self.rank
