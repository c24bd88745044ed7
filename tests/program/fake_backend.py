"""A backend of a few lines under the real interpreter: what SGLang's interpreter ran over to make the oracle's data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from quire.client.program_events import ProgramReader
from quire.client.programs import ProgramCall
from quire.errors import ProgramError
from quire.params import SamplingParams
from quire.program.frames import Frames
from quire.program.interpreter import Counts, Interpreter, Result
from quire.program.lane import Lane, StepError
from quire.program.selection import Decision, decide
from quire.program.tasks import Tasks
from quire.steps import Event, Gen, Program, Select
from quire.types import Delta, FinishReason, Request, Usage

INT = r"[-+]?[0-9]+[ \n]*"


class Backend:
    """Runs programs at once. `calls` is what reached it; `templates` the frames by name."""

    def __init__(self, folder: Path, template: str) -> None:
        given = json.loads((folder / "templates.json").read_text())[template]
        around = {role: (before, after) for role, (before, after) in given["role_prefix_and_suffix"].items()}
        self._frames = Frames(around, given["default_system_prompt"], tuple(given["stop_str"]))
        self.calls: list[list[Any]] = []
        self.num_requests = 0
        self._sessions: dict[str, dict[str, Lane]] = {}

    def role_frames(self) -> Frames:
        return self._frames

    def end_session(self, session: str) -> None:
        self._sessions.pop(session, None)

    def run_program(self, program: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        self.num_requests += 1
        call = msgspec.convert(dict(program), ProgramCall)
        lanes = {"": call.steps, **call.lanes} if call.steps or not call.lanes else call.lanes
        name = call.session or f"session-{self.num_requests}"
        made = Program(lanes=lanes, session=f"/{name}", keep=call.keep, stream=bool(call.stream))
        request = Request(id="x", tokens=[], sampling=SamplingParams(), seed=0, max_tokens=1, program=made)
        reader, events, tasks = ProgramReader(request, request.id), [], Tasks()
        interpreter = Interpreter(1 << 20, self._sessions.pop(name, None))
        caller = Caller(self, msgspec.convert({**call.sampling, "type": "gen"}, Gen))
        tasks.start(interpreter.run(made, tasks, caller, events.append))
        try:
            tasks.run()
        except StepError as error:
            yield from self._objects(reader, events)
            raise ProgramError(str(error)) from error
        finally:
            tasks.close()
        if call.keep:
            self._sessions[name] = interpreter.live_lanes()
        yield from self._objects(reader, events)
        yield reader.last()

    def _objects(self, reader: ProgramReader, events: list[Event]) -> list[dict[str, Any]]:
        return reader.push(Delta("x", 0, [], Usage(0, 0, 0), finish_reason=FinishReason.STOP, events=events))


class Caller:
    """The model: its answers are made of the length of the text."""

    def __init__(self, backend: Backend, defaults: Gen) -> None:
        self._calls, self._defaults = backend.calls, defaults

    async def generate(self, text: str, gen: Gen, show: Callable[[int, str], None]) -> Result:
        def of(name: str) -> Any:
            value = getattr(gen, name)
            return getattr(self._defaults, name) if value is None else value

        self._calls.append(["gen", text, of("max_tokens"), of("temperature")])
        if "BOOM" in text:
            raise StepError("boom")
        size = len(text)
        values = []
        for number in range(of("n") or 1):
            answer = f"<{size}>abc abc abc "
            if number:
                answer += f"#{number}"
            if gen.regex == INT:
                answer = f"{size} x"
            elif gen.regex == "think":
                answer = f"<think>why {size}</think> so {size}"
            answer = answer[: of("max_tokens")]
            stop = of("stop") or ()
            for one in [stop] if isinstance(stop, str) else stop:
                answer = answer.partition(one)[0]
            values.append(answer)
        for piece in values[0]:
            show(0, piece)
        return Result(values, "length", (0, 0, 0), {"prompt_chars": size})

    async def choose(self, text: str, select: Select, alone: bool) -> tuple[Decision, Counts]:
        self._calls.append(["select", text, len(select.choices)])
        rows = [
            [(-((7 * len(text) + 3 * ord(c) + j) % 11) / 10 - 0.1, 0, c) for j, c in enumerate(choice)]
            for choice in select.choices
        ]
        bare = [[None if j == 0 else -(j % 3) / 2 for j in range(len(row))] for row in rows]
        return decide(select.choices_method, rows, bare), (0, 0, 0)

    async def compute(self, text: str) -> None:
        self._calls.append(["cache_prefix", text])
