"""Requests beside the LLM API."""

from quire import LoRARequest, RequestError

__all__ = ["LoRARequest", "RequestError"]
