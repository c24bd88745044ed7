"""/v1/programs: steps that the engine runs as one request, with events by lane and variable."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

import msgspec
from starlette.requests import Request as HttpRequest

from quire.client.program_checks import MAX_CHOICES, MAX_DEPTH, MAX_LANES, MAX_STEPS, MAX_TOKENS
from quire.client.program_events import ProgramReader
from quire.client.programs import ProgramCall, program_request
from quire.serve.call import EngineCall
from quire.serve.errors import HttpError
from quire.serve.fields import common
from quire.serve.fields.foreign import LABELS, OTHERS_IGNORED, OTHERS_REFUSED
from quire.serve.fields.shapes import Fields, Refused
from quire.serve.ids import derived
from quire.serve.service import Service
from quire.serve.stream import DONE, event
from quire.types import Delta, Request

_encode = msgspec.json.Encoder().encode


class ProgramRequest(ProgramCall, kw_only=True):
    """POST /v1/programs."""

    model: common.Model | None = None
    priority: common.Priority = 0
    cache_salt: common.CacheSalt | None = None
    request_id: common.RequestId | None = None


PROGRAMS = Fields(
    path="/v1/programs",
    body=ProgramRequest,
    ignored={**LABELS, **OTHERS_IGNORED},
    refused={
        **OTHERS_REFUSED,
        **{name: Refused("begin with a text or role step") for name in ("prompt", "messages")},
    },
)


class ProgramObject(msgspec.Struct):
    """Answer of /v1/programs: text and variables of the first lane, and how each gen and select ended."""

    id: str
    created: int
    model: str
    text: str
    variables: dict[str, Any]
    session: str | None
    usage: dict[str, Any]
    steps: list[dict[str, Any]]
    object: Literal["program"] = "program"
    system_fingerprint: str | None = None


class ProgramsInfo(msgspec.Struct):
    """Answer of GET /v1/programs: how messages are framed, and the bounds of a program."""

    roles: dict[str, tuple[str, str]]
    default_system: str | None
    stop: tuple[str, ...]
    bos: str
    limits: dict[str, int]
    object: Literal["programs"] = "programs"


LIMITS = {
    "steps": MAX_STEPS,
    "lanes": MAX_LANES,
    "depth": MAX_DEPTH,
    "tokens": MAX_TOKENS,
    "choices": MAX_CHOICES,
}


async def describe(service: Service) -> ProgramsInfo:
    frames = service.front.frames
    return ProgramsInfo(dict(frames.around), frames.default_system, frames.stop, frames.bos, LIMITS)


class RunningProgram(EngineCall):
    """One program in the engine."""

    def __init__(
        self, service: Service, call_id: str, created: int, request: Request, fingerprint: str
    ) -> None:
        self.reader = ProgramReader(request, call_id)
        self.ended: list[dict[str, Any]] = []  # the last events of gens and selects
        self._last: Delta | None = None
        self.fingerprint = fingerprint
        super().__init__(service.engine, call_id, created, [request], service.config)

    async def take(self) -> list[Delta]:
        """Take deltas as EngineCall does. Raises the error that ended the program after its last events."""
        if self._last is not None:
            self.reader.raise_failure(self._last)
        return await super().take()

    size = 0  # its answer takes no time to make

    async def slices(self, deltas: list[Delta]) -> AsyncIterator[list[dict[str, Any]]]:
        """Return the events of deltas at once: a program has one sample."""
        yield self.pieces(deltas)

    def pieces(self, deltas: list[Delta]) -> list[dict[str, Any]]:
        """Return the events of deltas. Raises the error that ended the program, unless events come before it."""
        found: list[dict[str, Any]] = []
        for delta in deltas:
            found += self.reader.push(delta)
            self._last = delta
            if not found:
                self.reader.raise_failure(delta)
        return found

    async def finish(self) -> None:
        """Wait until the program has ended."""
        while deltas := await self.take():
            for delta in deltas:
                self.ended += self.reader.push(delta)
                self.reader.raise_failure(delta)

    def _log(self) -> None:
        usage = self.reader.usage
        fields = {
            "prompt_tokens": usage.num_prompt,
            "cached_tokens": usage.num_cached,
            "output_tokens": usage.num_output,
            "finish_reason": "stop" if self.reader.finished else "abort",
        }
        for times in self.generation.times:
            self._log_request(times, fields)


class ProgramAnswer:
    """Writes a program as an answer of /v1/programs."""

    def __init__(self, call: RunningProgram, model: str, streaming: bool) -> None:
        self.call, self.streaming, self._model = call, streaming, model

    def whole(self) -> bytes:
        last = self.call.reader.last()
        return _encode(
            ProgramObject(
                self.call.id,
                self.call.created,
                self._model,
                last["text"],
                last["variables"],
                last["session"],
                last["usage"],
                self.call.ended,
                system_fingerprint=self.call.fingerprint,
            )
        )

    def step(self, pieces: list[dict[str, Any]]) -> bytes:
        return b"".join(map(event, pieces))

    def end(self) -> bytes:
        return event(self.call.reader.last()) + DONE

    def error_event(self, error: HttpError) -> bytes:
        """Every gen and select that has begun ends with the reason "error"; then comes the error."""
        ends = b"".join(map(event, self.call.reader.end_open("error")))
        return ends + b"data: " + error.body() + b"\n\n" + DONE


async def run_program(service: Service, http: HttpRequest) -> ProgramAnswer:
    """Read, check and queue a program. Raises HttpError, RequestError or OverloadedError."""
    body = await service.read(http, PROGRAMS)
    model, call_id = service.check_model(body.model), service.new_id("prog-", http, body.request_id)
    owner = http.state.owner

    def make() -> Request:
        return program_request(
            service.front,
            service.next_request_id(call_id),
            body,
            owner,
            body.priority,
            body.cache_salt or "",
            derived(call_id, _encode(body)),
        )

    service.check_draining()
    request = await service.work(http, make, renders=True)
    gens = tuple([await service.with_grammar(http, gen, "steps", call_id) for gen in request.gens])
    request = service.assigned(http, msgspec.structs.replace(request, gens=gens), call_id, model)
    service.check_draining()
    running = RunningProgram(service, call_id, http.state.created, request, service.fingerprint(model))
    return ProgramAnswer(running, model, bool(body.stream))
