"""Adapters beside a model, by an older name."""

from tensorrt_llm.llmapi.configs import LoraConfig

__all__ = ["LoraConfig"]
