"""Turn the deltas of a program's request into events as JSON has them. Knows no HTTP."""

from __future__ import annotations

from typing import Any

from quire.errors import EngineError, ProgramError, SessionExpiredError
from quire.steps import EXPIRED, FAILED, Event
from quire.types import Delta, FinishReason, Request, Usage

Object = dict[str, Any]


class ProgramReader:
    """Turns deltas into objects, and ends what has begun if the program fails. `name` begins the ids of its calls."""

    def __init__(self, request: Request, name: str) -> None:
        assert request.program is not None
        self.usage = Usage(0, 0, 0)
        self.finished = False
        self._program, self._name = request.program, name
        self._open: dict[tuple[str, int], Object] = {}  # steps that have begun
        self._done: Event | None = None

    def push(self, delta: Delta) -> list[Object]:
        """Return the objects of a delta; call `raise_failure` after them."""
        found = []
        for event in delta.events or ():
            if event.kind == "done":
                self._done = event
            else:
                found.append(self._object(event))
        if delta.finish_reason is not None:
            self.finished, self.usage = True, delta.usage
        return found

    def raise_failure(self, delta: Delta) -> None:
        """Raise what ended the program early, if `delta` says so: ProgramError for a step that cannot be done."""
        if delta.finish_reason is None:
            return
        ended = None if self._done is None else self._done.finish_reason
        if ended == FAILED:
            raise ProgramError(delta.error or "a step failed")
        if delta.finish_reason is FinishReason.ERROR:
            raise delta.failure or EngineError("the engine failed on this program")
        if delta.finish_reason is FinishReason.ABORT:
            raise EngineError("the program was aborted")
        if ended == EXPIRED:
            raise SessionExpiredError(
                "this session does not exist: it has expired, was closed, or a call runs on it; send the whole program "
                "again",
                "session",
            )

    def end_open(self, reason: str) -> list[Object]:
        """End the steps that have begun, because the program is over."""
        found = [{**step, "value": None, "finish_reason": reason} for step in self._open.values()]
        self._open = {}
        return found

    def last(self) -> Object:
        """Return the last object of a program that came to its end."""
        done = self._done
        text, variables = (done.text, done.value) if done is not None else ("", {})
        counts = (self.usage.num_prompt, self.usage.num_cached, self.usage.num_output)
        return {
            "event": "done",
            "text": text,
            "variables": variables,
            "session": self._program.session.rpartition("/")[2] if self._program.keep else None,
            "usage": _usage(counts),
        }

    def _object(self, event: Event) -> Object:
        found: Object = {"event": event.kind, "lane": event.lane, "step": event.step, "name": event.name}
        if event.kind == "start":
            self._open[event.lane, event.step] = {**found, "event": "end"}
        elif event.kind == "text":
            found |= {"index": event.index, "text": event.text}
        else:
            self._open.pop((event.lane, event.step), None)
            found |= {"value": event.value, "finish_reason": event.finish_reason}
            found |= {"usage": _usage(event.usage), "meta_info": event.meta_info}
            if event.meta_info is not None and "id" in event.meta_info:
                found["meta_info"] = {**event.meta_info, "id": f"{self._name}/{event.lane}/{event.step}"}
            if event.reasoning is not None:
                found["reasoning"] = event.reasoning
        return found


def _usage(counts: tuple[int, int, int]) -> Object:
    prompt, cached, generated = counts
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
