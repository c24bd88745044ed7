"""One server for all tests that only ask it things."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.running import Server, start


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    running = start(served_model_name=["scripted", "alias"], max_body_bytes=1 << 20)
    yield running
    assert running.stop() == 0
    assert "ASGI" not in running.log, running.log
    assert "unexpected error" not in running.log, running.log
