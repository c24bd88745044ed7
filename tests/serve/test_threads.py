"""Long work runs beside the event loop: by the size of a body, and never two sizes in one queue."""

from __future__ import annotations

import asyncio
import threading

import pytest

from quire.serve.threads import INLINE_BYTES, LARGE_BYTES, Threads, within


@pytest.mark.parametrize(
    ("size", "inline", "where"),
    [
        (INLINE_BYTES, True, "MainThread"),
        (INLINE_BYTES, False, "quire-work"),
        (INLINE_BYTES + 1, True, "quire-work"),
        (LARGE_BYTES, True, "quire-work"),
        (LARGE_BYTES + 1, True, "quire-large"),
    ],
)
def test_the_size_of_a_body_says_where_it_is_worked_on(size: int, inline: bool, where: str) -> None:
    name = asyncio.run(Threads().run(size, lambda: threading.current_thread().name, inline))
    assert name.startswith(where)


def test_the_event_loop_and_smaller_bodies_go_on_beside_a_large_one() -> None:
    async def run() -> None:
        work, held = Threads(), threading.Event()
        large = asyncio.create_task(work.run(LARGE_BYTES + 1, lambda: held.wait(20)))
        assert await work.run(INLINE_BYTES + 1, lambda: "small") == "small"
        assert await work.run(0, lambda: "inline") == "inline"
        assert not large.done()
        held.set()
        assert await large

    asyncio.run(run())


def test_what_takes_too_long_is_ended() -> None:
    async def answer(seconds: float) -> int:
        await asyncio.sleep(seconds)
        return 3

    async def run() -> None:
        assert await within(20, answer(0)) == 3
        with pytest.raises(asyncio.TimeoutError):
            await within(0.01, answer(20))
        task = asyncio.create_task(within(20, answer(20)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
