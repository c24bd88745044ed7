"""Options of adapters: a section like config's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.errors import ConfigError
from quire.options import check_options, option

LoraDtype = Literal["auto", "float32", "float16", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters beside the model."""

    enable_lora: bool = option(False, "Take requests that name an adapter.")
    max_loras: int | None = option(
        None, "Most adapters in one step; default is 8, or --max-cpu-loras if that is less.", low=1, high=1024
    )
    max_cpu_loras: int | None = option(
        None, "Most adapters in memory; default is those of one step.", low=1, high=4096
    )
    max_lora_rank: int = option(16, "Largest rank of an adapter.", low=1, high=1024)
    lora_dtype: LoraDtype = option("auto", "Type of adapters in memory; auto is the model's.")
    lora_extra_vocab_size: int = option(0, "Most tokens that an adapter adds.", low=0, high=1 << 16)
    fully_sharded_loras: bool = option(False, "Accepted: each rank computes its share either way.")

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_loras and (self.max_cpu_loras or self.max_loras) < self.max_loras:
            raise ConfigError(f"--max-cpu-loras must be at least --max-loras {self.max_loras}")

    @property
    def most_at_once(self) -> int:
        """Return how many adapters one step may have."""
        return self.max_loras or min(8, self.max_cpu_loras or 8)

    @property
    def slots(self) -> int:
        """Return how many adapters are in memory at once."""
        return self.max_cpu_loras or self.most_at_once

    @property
    def spare_tokens(self) -> int:
        """Room in the vocabulary for tokens that adapters add."""
        return self.lora_extra_vocab_size if self.enable_lora else 0
