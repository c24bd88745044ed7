"""Runs programs on an engine of this process, as the backend of `quire.program`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from quire.client import programs
from quire.client.program_events import ProgramReader
from quire.errors import RequestError
from quire.llm.running import RunningEngine
from quire.program.frames import Frames
from quire.types import Request


class ProgramMethods(RunningEngine):
    """Runs programs of steps inside the engine."""

    def run_program(self, program: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Run `{"steps": [...], ...}`, as POST /v1/programs takes it, and yield its events; the last one is "done".

        Leaving early ends the program. Raises RequestError for a program that is refused, before it starts, and
        EngineError for one that fails.
        """
        try:
            call = msgspec.convert(program, programs.ProgramCall)
        except msgspec.ValidationError as error:
            raise RequestError(f"the program is malformed: {error}", "steps") from error
        request = programs.program_request(self._front, self._new_id(), call)
        return self._program_events(request)

    def _program_events(self, request: Request) -> Iterator[dict[str, Any]]:
        reader = ProgramReader(request, request.id)
        with self._submit([request]) as call:
            for deltas in call:
                for delta in deltas:
                    yield from reader.push(delta)
                    reader.raise_failure(delta)
        yield reader.last()

    def end_session(self, session: str) -> None:
        """Forget the state of a program that was kept for its next call."""
        list(self.run_program({"session": session}))

    def role_frames(self) -> Frames:
        """Return how the model's chat template frames messages."""
        return self._front.frames
