"""An engine for programs with an event loop."""

from quire import AsyncLLM

__all__ = ["AsyncLLM"]
