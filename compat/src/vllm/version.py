"""The version of vLLM whose names these are."""

__version__ = "0.32.0"
