"""Frames between the API process and the engine process; `wire.py` carries them.

Each step sends one frame with all its updates, not one per token. Knows messages, no engine, no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from quire.config import EngineConfig
from quire.engine.log import LogFormat, LogLevel
from quire.engine.verbs import Result, Verb
from quire.params import SamplingParams
from quire.types import Delta, EngineStats, ModelCard, Request

NO_LISTS: dict[str, Any] = {
    "sampling": SamplingParams(),
    "bad_words_token_ids": (),
    "prediction": (),
    "choices": (),
    "grammar": None,
}
"""NO_LISTS are fields that may be long, as short as they can be."""


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Queue requests. If they are `alike`, the first one's long fields are those of all."""

    requests: list[Request]
    alike: bool = False

    @classmethod
    def of(cls, requests: list[Request]) -> Submit:
        """Make the command for the requests of a call; what they share crosses once."""
        first, *others = requests
        values = [getattr(first, name) for name in NO_LISTS]
        for other in others:
            if any(getattr(other, name) is not value for name, value in zip(NO_LISTS, values, strict=True)):
                return cls(requests)
        return cls([first, *(msgspec.structs.replace(other, **NO_LISTS) for other in others)], bool(others))

    @property
    def whole(self) -> list[Request]:
        """Return the requests as they were given."""
        if not self.alike:
            return self.requests
        first, *others = self.requests
        shared = {name: getattr(first, name) for name in NO_LISTS}
        return [first, *(msgspec.structs.replace(other, **shared) for other in others)]


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End a request, or only its sample `index`."""

    request_id: str
    index: int | None = None


class Order(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A verb of an operator, answered once by a Reply with the same `id`."""

    id: int
    verb: Verb


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Leave the loop; drop running requests."""


Command = Submit | Abort | Order | Stop


class Loading(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The process runs and begins to load, at `at` seconds of the monotonic clock that both processes share."""

    at: float


class EngineReady(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The engine takes requests from now on. `phases` are the parts of the loading time, in seconds."""

    info: ModelCard
    phases: dict[str, float]
    stats: EngineStats


class Scheduled(msgspec.Struct, frozen=True, array_like=True):
    """A sample got a slot at `at` (monotonic seconds); repeated after each preemption."""

    request_id: str
    index: int
    at: float


class StepTime(msgspec.Struct, frozen=True, array_like=True):
    """The seconds that a step took, and by how many of them prefill delayed its decoding sequences."""

    seconds: float
    prompts: float


class Updates(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The changes of one step. `stats` is included now and then, and whenever the engine goes idle.

    `steps` are the times of this step and of earlier steps that changed nothing.
    """

    deltas: list[Delta]
    scheduled: list[Scheduled] = []
    stats: EngineStats | None = None
    steps: list[StepTime] = []


class Reply(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to an Order: how things are after it and its `result`, or `error`."""

    id: int
    stats: EngineStats | None = None
    error: str | None = None
    result: Result = None


class EngineFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The engine cannot start or continue. `kind` is the class of the error."""

    kind: str
    message: str


Event = Loading | EngineReady | Updates | Reply | EngineFailed


class Launch(msgspec.Struct, frozen=True, array_like=True):
    """The engine process's configuration, read from its standard input.

    `channel` is the descriptor of its end of the channel, `maker` the module that makes the core, `page` the descriptor
    of the page for its signs of life.
    """

    channel: int
    maker: str
    config: EngineConfig
    stats_interval: float = 0.25
    log_format: LogFormat = "text"
    log_level: LogLevel = "info"
    page: int | None = None


encode: Callable[[Command | Event | Launch], bytes] = msgspec.msgpack.Encoder().encode
decode_launch = msgspec.msgpack.Decoder(Launch).decode
decode_command: Callable[[bytes], Command] = msgspec.msgpack.Decoder(Command).decode
decode_event: Callable[[bytes], Event] = msgspec.msgpack.Decoder(Event).decode
"""These raise msgspec.ValidationError if a frame is no such message."""
