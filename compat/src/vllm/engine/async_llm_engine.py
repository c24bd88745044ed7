"""An engine for programs with an event loop."""

from quire import AsyncLLM as AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
