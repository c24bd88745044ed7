"""Algorithms by name."""

from tensorrt_llm.quantization import QuantAlgo

__all__ = ["QuantAlgo"]
