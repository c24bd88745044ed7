"""Offline inference in this process, with vLLM's names."""

from quire.llm.llm import LLM

__all__ = ["LLM"]
