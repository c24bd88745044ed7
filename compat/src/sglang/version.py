"""The version of SGLang whose names these are."""

__version__ = "0.5.23"
