"""`LLM` by the name that it has beside TensorRT-LLM's newer backend."""

from tensorrt_llm.llmapi import LLM

__all__ = ["LLM"]
