"""Decides which models of a server are loaded, which drain, and whose turn it is. Does no I/O; time is an argument.

Models are loaded in the order in which they began to wait, one change at a time: drain, unload, load. Idle models make
room first, the least recently used before others. One with running requests makes room `quantum` seconds times its
weight after it was loaded: it drains, its running requests end and new ones wait. Within that time a model whose
requests came within PAUSE seconds of each other is idle only after PAUSE seconds: a client's next request follows its
last answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from quire.errors import ConfigError
from quire.runtime.memory import GIB

PAUSE = 0.05

State = Literal["unloaded", "loading", "ready", "draining", "unloading"]


class Action(NamedTuple):
    """What to do next. To `open` a model is to let its waiting requests run: it no longer drains."""

    verb: Literal["load", "unload", "open"]
    name: str


@dataclass(slots=True)
class Resident:
    """A model: its bytes, its state, and its requests that run and wait."""

    name: str
    size: int
    pinned: bool = False
    weight: float = 1.0
    state: State = "unloaded"
    running: int = 0
    waiting: int = 0
    asked: int = 0  # place in the order of models that wait
    turn: float = 0.0  # when it was loaded
    used: float = 0.0  # when it last had a request
    ended: float = float("-inf")  # when its last request ended
    eager: bool = False  # its last request came within PAUSE of another
    leaving: bool = False  # an operator unloads it


class Residents:
    """The models of a server within a budget of bytes, and `most` at once."""

    def __init__(
        self, models: Iterable[Resident], budget: int, *, most: int | None, quantum: float, idle: float | None
    ) -> None:
        self.models = {model.name: model for model in models}
        self._budget, self._quantum, self._idle = budget, quantum, idle
        self._most = len(self.models) if most is None else most
        self._order = 0
        for model in self.models.values():
            if model.size > budget:
                sizes = f"{model.size / GIB:.2f} GiB, and all models have {budget / GIB:.2f}"
                raise ConfigError(
                    f"{model.name} needs {sizes}: give --models-memory more, or it less KV cache"
                )
        self._check_pins()

    def ask(self, name: str, now: float) -> bool:
        """Add a request: it runs (True), or waits for `open_all`."""
        model = self.models[name]
        model.used, model.eager = now, bool(model.running) or now - model.ended <= PAUSE
        if model.state == "ready":
            model.running += 1
            return True
        self._order += 1
        model.asked = model.asked if model.waiting else self._order
        model.waiting += 1
        return False

    def leave(self, name: str) -> None:
        """Take a waiting request away."""
        self.models[name].waiting -= 1

    def done(self, name: str, now: float) -> None:
        """End a running request."""
        model = self.models[name]
        model.running, model.used, model.ended = model.running - 1, now, now

    def loaded(self, name: str, now: float) -> None:
        """Note that a model is loaded: its turn begins, and all its waiting requests run."""
        self.models[name].turn = self.models[name].used = now
        self._open(self.models[name])

    def failed(self, name: str) -> None:
        """Note that a model was not loaded; its waiting requests end."""
        self.models[name].waiting = 0
        self.unloaded(name)

    def died(self, name: str) -> None:
        """Note that the engine of a loaded model is gone: what is left of it is being unloaded."""
        self.models[name].state = "unloading"

    def unloaded(self, name: str) -> None:
        """Note that a model holds no memory."""
        self.models[name].state, self.models[name].leaving = "unloaded", False

    def unload(self, name: str) -> None:
        """Let a ready model drain because an operator says so. ConfigError: it is pinned."""
        model = self.models[name]
        if model.pinned:
            raise ConfigError(f"{name} is pinned: unpin it first")
        if model.state in ("ready", "draining"):
            model.state, model.leaving = "draining", True

    def pin(self, name: str, pinned: bool) -> None:
        """Keep a model from being unloaded, or no longer. ConfigError: another model would no longer fit."""
        model = self.models[name]
        before, model.pinned = model.pinned, pinned
        try:
            self._check_pins()
        except ConfigError:
            model.pinned = before
            raise

    def next(self, now: float) -> Action | None:
        """Choose what to do now. The model's state follows; `loaded`, `failed` or `unloaded` tells the end."""
        models = self.models.values()
        if any(model.state in ("loading", "unloading") for model in models):
            return None
        head = self._head()
        if head is not None and not self._shortage(head, self._held()):
            head.state = "loading"
            return Action("load", head.name)
        for model in models:
            if model.state == "draining" and (model.pinned or (head is None and not model.leaving)):
                self._open(model)
                return Action("open", model.name)
        if head is not None:
            self._make_room(head, now)
        for model in models:
            idle = model.state == "ready" and not model.pinned and now >= self._idle_at(model)
            if not model.running and (model.state == "draining" or idle):
                model.state = "unloading"
                return Action("unload", model.name)
        return None

    def due(self, now: float) -> float | None:
        """Tell when `next` may choose otherwise although nothing has happened."""
        ready = [m for m in self.models.values() if m.state == "ready" and not m.pinned]
        waited = self._head() is not None
        times = [self._idle_at(m) for m in ready if not m.running]
        times += [self._free_at(m) for m in ready if waited]
        return min((at for at in times if now < at < float("inf")), default=None)

    def _head(self) -> Resident | None:
        """Find the model that is to be loaded next."""
        waiting = [m for m in self.models.values() if m.waiting and m.state == "unloaded"]
        return min(waiting, key=lambda model: model.asked, default=None)

    def _held(self) -> list[Resident]:
        return [model for model in self.models.values() if model.state != "unloaded"]

    def _shortage(self, head: Resident, held: list[Resident]) -> bool:
        """Whether `head` finds no room beside `held`."""
        return sum(m.size for m in held) + head.size > self._budget or len(held) >= self._most

    def _make_room(self, head: Resident, now: float) -> None:
        """Let as few models drain as `head` needs, if enough may drain."""
        held = [model for model in self._held() if model.state != "draining"]
        free = [m for m in held if not m.pinned and now >= self._free_at(m)]
        free.sort(key=lambda model: (model.running > 0, model.turn if model.running else model.used))
        chosen: list[Resident] = []
        while self._shortage(head, held):
            if not free:
                return
            chosen.append(free.pop(0))
            held.remove(chosen[-1])
        for model in reversed(chosen):  # the last may have made the first needless
            if self._shortage(head, [*held, model]):
                model.state = "draining"
            else:
                held.append(model)

    def _open(self, model: Resident) -> None:
        model.state, model.leaving = "ready", False
        model.running, model.waiting = model.running + model.waiting, 0

    def _free_at(self, model: Resident) -> float:
        """Tell when a model may make room for another."""
        end = model.turn + self._quantum * model.weight
        return end if model.running else min(end, model.used + PAUSE * model.eager)

    def _idle_at(self, model: Resident) -> float:
        return float("inf") if self._idle is None else model.used + self._idle

    def _check_pins(self) -> None:
        """Raise ConfigError if some model finds no room beside those that are pinned."""
        pinned = [model for model in self.models.values() if model.pinned]
        others = [model for model in self.models.values() if not model.pinned]
        size, largest = sum(m.size for m in pinned), max(others, key=lambda m: m.size, default=None)
        if size > self._budget or len(pinned) > self._most:
            raise ConfigError(
                "the pinned models do not fit together: pin fewer, or give --models-memory more"
            )
        if largest is not None and self._shortage(largest, pinned):
            raise ConfigError(f"{largest.name} finds no room beside the pinned models: pin fewer")
