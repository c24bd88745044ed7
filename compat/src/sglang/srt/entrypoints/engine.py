"""A model in this process."""

from quire.llm.sglang_engine import Engine

__all__ = ["Engine"]
