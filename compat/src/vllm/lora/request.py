"""The adapter of a request."""

from quire import LoRARequest

__all__ = ["LoRARequest"]
