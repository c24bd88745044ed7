"""Quire serves large language models: `from quire import LLM, SamplingParams`."""

from __future__ import annotations

import importlib
from typing import Any

from quire.errors import QuireError, RequestError
from quire.params import OutputKind as RequestOutputKind
from quire.params import PoolingParams, SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"
# Names whose modules bring numpy, the kernels or more: loaded when first asked for.
_LATER = {
    "LLM": "quire.llm.llm",
    "AsyncLLM": "quire.llm.async_llm",
    "BeamSearchParams": "quire.client.beams",
    "RequestOutput": "quire.client.outputs",
    "CompletionOutput": "quire.client.outputs",
    "LogitsProcessor": "quire.logits_processor",
    "AdapterLogitsProcessor": "quire.logits_processor",
    "LoRARequest": "quire.client.adapters",
}
_VLLMS = ("AsyncEngineArgs", "EngineArgs", "LLMEngine")
__all__ = [
    "LLM",
    "AdapterLogitsProcessor",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "LoRARequest",
    "LogitsProcessor",
    "PoolingParams",
    "QuireError",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    hint = f": `from vllm import {name}`, of the package quire-compat" if name in _VLLMS else ""
    raise AttributeError(f"module 'quire' has no attribute {name!r}{hint}")
