"""The parser of scripts."""

from quire.flags.arguments import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
