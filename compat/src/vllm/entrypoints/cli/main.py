"""`vllm serve ...`: `quire` with vLLM's defaults."""

from quire.cli import main

__all__ = ["main"]
