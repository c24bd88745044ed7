"""The limit on open files: each connection is one."""

from __future__ import annotations

import resource


def raise_descriptor_limit() -> int:
    """Raise this process's limit on open files as far as it may; returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # macOS allows less than it reports
        return soft
    return hard
