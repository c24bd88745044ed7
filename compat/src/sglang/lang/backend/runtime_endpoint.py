"""A server as the backend of programs."""

from quire.entrypoints.sglang.runtime import Runtime
from quire.program import RuntimeEndpoint

__all__ = ["Runtime", "RuntimeEndpoint"]
