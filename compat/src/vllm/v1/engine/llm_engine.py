"""An engine for programs with a loop of their own."""

from vllm.engine.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
