"""The options of an engine, with vLLM's share of memory."""

import quire

DEFAULTS = {"gpu_memory_utilization": 0.9}


class EngineArgs(quire.EngineArgs):
    """The options of an engine."""

    defaults = DEFAULTS


class AsyncEngineArgs(quire.AsyncEngineArgs):
    """The options of an asynchronous engine."""

    defaults = DEFAULTS


__all__ = ["DEFAULTS", "AsyncEngineArgs", "EngineArgs"]
