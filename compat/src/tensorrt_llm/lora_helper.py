"""Adapters beside a model."""

from tensorrt_llm.llmapi.configs import LoraConfig

__all__ = ["LoraConfig"]
