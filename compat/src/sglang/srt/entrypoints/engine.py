"""A model in this process."""

from quire_compat.sglang.engine import Engine

__all__ = ["Engine"]
