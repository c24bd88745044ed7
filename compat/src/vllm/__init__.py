"""vLLM's names for Quire."""

from quire import (
    LLM,
    BeamSearchParams,
    CompletionOutput,
    EngineArgs,
    PoolingParams,
    RequestOutput,
    SamplingParams,
)

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineArgs",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
]
