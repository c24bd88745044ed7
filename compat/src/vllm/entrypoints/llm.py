"""`LLM`, with vLLM's share of memory."""

from __future__ import annotations

from functools import cached_property

import quire
from vllm.config.model import ModelConfig
from vllm.engine.arg_utils import DEFAULTS


class LLM(quire.LLM):
    """A model ready to generate."""

    defaults = DEFAULTS

    @property
    def llm_engine(self) -> LLM:
        """The engine, which is this object's own."""
        return self

    @cached_property
    def model_config(self) -> ModelConfig:
        return ModelConfig.of(self.config, self.max_model_len)


__all__ = ["LLM"]
