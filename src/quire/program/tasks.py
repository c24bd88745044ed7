"""Coroutines of one program that wait for signals: what asyncio does, without a loop, a clock or threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


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

    def __await__(self) -> Generator[Signal[T], None, T]:
        if not self.is_set:
            yield self
        return cast(T, self._value)

    def wake_later(self, waiting: Coroutine[Any, Any, Any]) -> None:
        self._waiting.append(waiting)


class Tasks:
    """Runs coroutines until all of them wait."""

    def __init__(self) -> None:
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
        """Go on with everything that can go on."""
        while self.ready:
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

    def close(self) -> None:
        """End all coroutines where they are."""
        self.ready.clear()
        for task, work in self._all.items():
            task.close()
            work.close()  # the task may not have begun
        self._all.clear()
