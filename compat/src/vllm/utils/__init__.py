"""Helpers of scripts."""

import uuid

from quire.flags.arguments import FlexibleArgumentParser


def random_uuid() -> str:
    """A new request id."""
    return uuid.uuid4().hex


__all__ = ["FlexibleArgumentParser", "random_uuid"]
