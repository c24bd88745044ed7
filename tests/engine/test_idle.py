"""The loop of an engine's process while nothing is to be done: the device gets ready, and a request waits for no more
than a piece of that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine.ipc import Stop, encode
from quire.engine.process import EngineLoop


class Idle:
    """A channel on which nothing comes until somebody waits without end."""

    def __init__(self) -> None:
        self.waited: list[int | None] = []

    def wait(self, milliseconds: int | None) -> None:
        self.waited.append(milliseconds)

    def receive(self) -> list[Any]:
        return [encode(Stop())] if None in self.waited else []

    def send(self, frame: Any) -> None: ...


@pytest.mark.parametrize("pieces", [0, 3])
def test_an_idle_engine_prepares_piece_by_piece(pieces: int) -> None:
    left = [False, *[True] * pieces]
    core: Any = SimpleNamespace(has_work=False, on_idle=left.pop)
    channel: Any = Idle()
    EngineLoop(core, channel, 1.0).run()
    assert channel.waited == [*[0] * pieces, None]
    core.on_idle, channel.waited = bool, []
    EngineLoop(core, channel, 1.0).run()
    assert channel.waited == [None]
