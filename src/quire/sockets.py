"""Receives from sockets by a deadline, and tells which addresses mean this machine."""

from __future__ import annotations

import ipaddress
import socket
import time


def receive_exactly(connection: socket.socket, size: int, until: float | None = None) -> bytearray:
    """Receive `size` bytes before the time `until` of time.monotonic(). TimeoutError past it, EOFError at the end."""
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        set_deadline(connection, until)
        got = connection.recv_into(view[at:])
        if not got:
            raise EOFError("the connection ended")
        at += got
    return data


def set_deadline(connection: socket.socket, until: float | None) -> None:
    """Let the next call wait until then; None without limit. TimeoutError if it has passed."""
    left = None if until is None else until - time.monotonic()
    if left is not None and left <= 0:
        raise TimeoutError
    connection.settimeout(left)


def is_local(host: str) -> bool:
    """Tell whether a name or an address means the machine itself."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
