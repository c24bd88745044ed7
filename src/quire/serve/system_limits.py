"""Check the system's limits on this process: open files, of which each connection is one, and memory."""

from __future__ import annotations

import resource

from quire.errors import ResourceError

# Files, sockets and pipes of a server without clients, and the address space that it maps beside the engine's.
LEAST_DESCRIPTORS = 64
LEAST_MEMORY = 1 << 29


def check_limits() -> None:
    """Check that the process may have what a server needs to start. Raises ResourceError."""
    limit = raise_descriptor_limit()
    if 0 <= limit < LEAST_DESCRIPTORS:
        raise ResourceError(
            f"the limit on open files is {limit}, and a server needs {LEAST_DESCRIPTORS}: raise it (ulimit -n)"
        )
    memory = resource.getrlimit(resource.RLIMIT_AS)[0]
    if memory != resource.RLIM_INFINITY and memory < LEAST_MEMORY:
        raise ResourceError(
            f"the limit on memory is {memory >> 20} MiB, and a server needs {LEAST_MEMORY >> 20} MiB: "
            "raise it (ulimit -v)"
        )


def raise_descriptor_limit() -> int:
    """Raise this process's limit on open files as far as it may; returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # macOS allows less than it reports
        return soft
    return hard
