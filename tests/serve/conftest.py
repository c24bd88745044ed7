"""Servers that many tests ask, and a client of the one that a module asks."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.serve.running import Server, start


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A server of the scripted core. A module may have another one by this name."""
    running = start(served_model_name=["scripted", "alias"], max_body_bytes=1 << 20)
    yield running
    assert running.stop() == 0
    assert "ASGI" not in running.log, running.log
    assert "unexpected error" not in running.log, running.log


@pytest.fixture(scope="session")
def shipped() -> Iterator[Server]:
    """A server of the shipped model."""
    running = start(maker="quire.client.start", model="", threads=1)
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    """A client of the module's server."""
    with server.client as client:
        yield client
