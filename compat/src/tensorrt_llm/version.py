"""The version of TensorRT-LLM whose names these are."""

__version__ = "1.0.0"
