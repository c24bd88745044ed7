"""The LLM API by its older name."""

from tensorrt_llm.llmapi import (
    LLM,
    BuildConfig,
    KvCacheConfig,
    QuantAlgo,
    QuantConfig,
    RequestOutput,
    SamplingParams,
)

__all__ = [
    "LLM",
    "BuildConfig",
    "KvCacheConfig",
    "QuantAlgo",
    "QuantConfig",
    "RequestOutput",
    "SamplingParams",
]
