"""Coroutines of one program that wait for signals: what asyncio does, without a loop or threads."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")
TURN_SECONDS = 0.005


class Turn:
    """A stretch of work that all programs share between two steps. It is `over` after TURN_SECONDS."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._end = clock, 0.0

    def begin(self) -> None:
        self._end = self._clock() + TURN_SECONDS

    @property
    def over(self) -> bool:
        return self._clock() >= self._end


class Signal(Generic[T]):
    """A value that comes once. Coroutines await it."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._waiting: list[Coroutine[Any, Any, Any]] = []
        self._value: T | None = None
        self.is_set = False

    def set(self, value: T) -> None:
        """Give the value; waiting coroutines go on at the next `Tasks.run`. A second value is ignored."""
        if not self.is_set:
            self.is_set, self._value = True, value
            self._tasks.ready += self._waiting
            self._waiting = []

    @property
    def value(self) -> T:
        """Return the value, once it is set."""
        return cast(T, self._value)

    def __await__(self) -> Generator[Signal[T], None, T]:
        if not self.is_set:
            yield self
        return self.value

    def wake_later(self, waiting: Coroutine[Any, Any, Any]) -> None:
        self._waiting.append(waiting)


class Tasks:
    """Runs coroutines until all of them wait, or the turn is over. `await tasks` goes on then in a later turn."""

    def __init__(self, turn: Turn | None = None) -> None:
        self._turn = turn
        self.ready: deque[Coroutine[Any, Any, Any]] = deque()
        self._all: dict[Coroutine[Any, Any, Any], Coroutine[Any, Any, Any]] = {}  # with the work in each

    def start(self, work: Coroutine[Any, Any, T]) -> Signal[T]:
        """Run `work` at the next `run`; the signal is its result. An exception in it comes out of `run`."""
        done: Signal[T] = Signal(self)

        async def whole() -> None:
            done.set(await work)

        task = whole()
        self._all[task] = work
        self.ready.append(task)
        return done

    def run(self) -> None:
        """Go on with everything that can go on in this turn; the rest stays `ready`."""
        while self.ready and not self._is_over:
            task = self.ready.popleft()
            try:
                signal = task.send(None)
            except StopIteration:
                del self._all[task]
            except BaseException:
                del self._all[task]
                raise
            else:
                signal.wake_later(task)

    @property
    def _is_over(self) -> bool:
        return self._turn is not None and self._turn.over

    def __await__(self) -> Generator[Tasks, None, None]:
        if self._is_over:
            yield self

    def wake_later(self, waiting: Coroutine[Any, Any, Any]) -> None:
        self.ready.append(waiting)

    def close(self) -> None:
        """End all coroutines where they are."""
        self.ready.clear()
        for task, work in self._all.items():
            task.close()
            work.close()  # the task may not have begun
        self._all.clear()
