"""What programs ask about an engine's model."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config import EngineConfig


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model as it is served."""

    model: str
    tokenizer: str
    dtype: str
    max_model_len: int
    seed: int
    revision: str | None = None
    quantization: str | None = None
    trust_remote_code: bool = False

    @classmethod
    def of(cls, config: EngineConfig, max_model_len: int) -> ModelConfig:
        own = config.model
        return cls(
            own.model,
            own.tokenizer or own.model,
            own.dtype,
            max_model_len,
            config.seed or 0,
            own.revision,
            own.quantization,
        )

    @property
    def served_model_name(self) -> str:
        return self.model


__all__ = ["ModelConfig"]
