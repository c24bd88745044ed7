"""Quire serves large language models: `from quire import LLM, SamplingParams`."""

from __future__ import annotations

import importlib
from typing import Any

from quire.errors import QuireError, RequestError
from quire.params import SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"
__all__ = ["LLM", "QuireError", "RequestError", "SamplingParams", "StructuredOutputsParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Load `LLM`, with numpy and the kernels, when it is first asked for."""
    if name == "LLM":
        return importlib.import_module("quire.llm").LLM
    raise AttributeError(f"module 'quire' has no attribute {name!r}")
