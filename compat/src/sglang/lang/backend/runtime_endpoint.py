"""A server as the backend of programs."""

from quire.program import RuntimeEndpoint
from quire_compat.sglang.runtime import Runtime

__all__ = ["Runtime", "RuntimeEndpoint"]
