"""Run a program's requests on an engine core. Token ids only."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from quire.engine.api import Queue
from quire.errors import EngineError
from quire.steps import Event
from quire.types import Delta, Request

if TYPE_CHECKING:
    from quire.grammar.compiler import Grammar, GrammarCompiler

T = TypeVar("T")

Later = tuple["Run", Future[Any], Callable[[], None]]
"""Work of a run in a thread, and what takes its result."""


class Run:
    """The requests of one program. It receives their deltas; when it ends, the rest are dropped."""

    def __init__(
        self,
        request: Request,
        core: Queue,
        owners: dict[str, Run],
        later: list[Later],
        grammars: Callable[[], GrammarCompiler] | None = None,
    ) -> None:
        self.request = request
        self.live: dict[str, int] = {}  # samples that run, by request
        self.num_cached = 0  # prompt tokens of the first request found in the prefix cache
        self.events: list[Event] = []  # the next step returns them
        self._core = core
        self._owners = owners  # the runs of all live requests
        self._later = later  # work of all runs
        self._grammars = grammars
        self._first = True
        self._goes_on = False  # in the next turn

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._own(request)
        self._core.add(request)

    def fork(self, request_id: str, request: Request, output: list[int]) -> None:
        """Queue `request` as a continuation of a live one of this program; both share its KV."""
        self._own(request)
        self._core.fork(request_id, 0, request, output)

    def drop(self, request_id: str) -> None:
        """End a request and drop its remaining deltas."""
        self.live.pop(request_id, None)
        self._owners.pop(request_id, None)
        self._core.drop(request_id)

    def drop_all(self) -> None:
        """End all requests."""
        for request_id in list(self.live):
            self.drop(request_id)

    def end_sample(self, request_id: str, index: int) -> None:
        """End one sample of a request and drop its remaining deltas."""
        self._core.drop(request_id, index)
        self._ended(request_id)

    def later(self, work: Future[T], take: Callable[[T], None]) -> None:
        """Call `take` with the result of `work` between two steps; then the program goes on, with an empty delta."""
        self._later.append((self, work, lambda: take(work.result())))

    def compile(self, grammar: str, take: Callable[[Grammar], None]) -> None:
        """Call `take` with a compiled grammar between two steps; then the program goes on, with an empty delta."""
        if self._grammars is None:
            raise EngineError("this engine was started without support for grammars")
        self.later(self._grammars().submit(grammar, self.request.owner), take)

    def go_on(self) -> None:
        """Let the program go on in the next turn, with an empty delta."""
        if not self._goes_on:
            self._goes_on, now = True, Future[None]()
            now.set_result(None)
            self.later(now, self._went_on)

    def _went_on(self, _: None) -> None:
        self._goes_on = False

    @property
    def waits(self) -> bool:
        """Whether requests or other work of the program are under way."""
        return bool(self.live) or any(run is self for run, _, _ in self._later)

    def report(self, event: Event) -> None:
        """Send an event to the caller of the program."""
        self.events.append(event)

    def took(self, delta: Delta) -> None:
        """Account for a delta that is about to go to the program."""
        if self._first:
            self._first, self.num_cached = False, delta.usage.num_cached
        if delta.finish_reason is not None:
            self._ended(delta.request_id)

    def _own(self, request: Request) -> None:
        self.live[request.id] = request.sampling.n
        self._owners[request.id] = self

    def _ended(self, request_id: str) -> None:
        """One more sample has ended."""
        self.live[request_id] -= 1
        if not self.live[request_id]:
            del self.live[request_id], self._owners[request_id]


Program = Callable[[Request, Run], Generator[None, Delta, list[Delta]]]
"""Gets its request and a `Run`, yields to receive the next delta, and returns the deltas that end its samples."""
