"""One request on its way through replicas: sent again while nothing was sent on, continued once something was."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from base64 import b64decode
from urllib.parse import quote

import msgspec
import xxhash
from starlette.datastructures import Headers as NoHeaders
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.cluster.choice import Ask
from quire.cluster.loads import Booking
from quire.cluster.options import RouteConfig
from quire.cluster.prefixes import Prompt, digests
from quire.cluster.replicas import Member, Replicas, label
from quire.cluster.streams import DiffersError, Passage, Reader
from quire.cluster.tally import Tally
from quire.errors import QuireError
from quire.serve.admission import is_anthropic, route_path
from quire.serve.anthropic.protocol import error_body
from quire.serve.errors import ErrorInfo, HttpError, as_http, unavailable
from quire.serve.held import BLOCK_BYTES, written
from quire.serve.stream import KEEP_ALIVE, Disconnected, event, watched
from quire.serve.upstream import Connection, Headers, Lost

log = logging.getLogger("quire.route")

MOST_MOVES = 5
MOST_ENGINES = 2
"""A request under which MOST_ENGINES engines died gets its error instead of another one."""
WAIT_SECONDS = 1.0
"""While no replica is up, a stream gets a comment every WAIT_SECONDS."""
BYTES_PER_TOKEN = 4
PASSED_ON = (
    b"content-type",
    b"accept",
    b"anthropic-version",
    b"anthropic-beta",
    b"traceparent",
    b"tracestate",
)
"""Headers of clients that replicas get; all others end here."""
SENT_BACK = (b"content-type", b"cache-control", b"retry-after", b"x-ignored-fields")
"""Headers of replicas that clients get."""
_encode = msgspec.json.Encoder().encode


class Asked(Prompt):
    """The fields of a body that a choice looks at."""

    model: str | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None


_asked = msgspec.json.Decoder(Asked)


class Request:
    """A client's request, as it goes to every replica that is tried. `ask` is the choice's view of it."""

    def __init__(self, scope: Scope, body: bytes) -> None:
        self.body, self.path, self.method = body, route_path(scope), str(scope["method"])
        self.headers: Headers = [pair for pair in scope["headers"] if pair[0] in PASSED_ON]
        self.id: str = scope["state"]["request_id"]
        try:
            asked = _asked.decode(body) if body else Asked()
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            asked = Asked()  # the replica says what is wrong
        text, owner, self.model = asked.text, scope["state"]["owner"], asked.model or ""
        names = digests(text, owner, self.model, asked.cache_salt or "")
        session = next((v for k, v in scope["headers"] if k == b"x-session-id"), b"").decode("latin-1")
        session = session or asked.user or asked.prompt_cache_key or ""
        self.ask = Ask(
            len(text) // BYTES_PER_TOKEN + 1, names, session=session, block=BLOCK_BYTES // BYTES_PER_TOKEN
        )
        self.route = {
            "id": self.id,
            "created": int(time.time()),
            "seed": xxhash.xxh3_64_intdigest(self.id.encode()) >> 1,
            "owner": owner,
            "resumable": True,
            "prefix": written(names),
        }

    def first(self) -> tuple[str, Headers, bytes]:
        """Write the request for its first replica, or for one that begins again: first line, headers and body."""
        line = f"{self.method} {quote(self.path)}"
        return line, [*self.headers, (b"x-quire-route", _encode(self.route))], self.body

    def on(self, passage: Passage) -> tuple[str, Headers, bytes]:
        """Write the request for a replica that goes on after what was sent."""
        headers = {name.decode(): value.decode("latin-1") for name, value in self.headers}
        body: dict[str, object] = {"path": self.path, "body": self.body.decode(), "headers": headers}
        body |= {"route": self.route, "sent": passage.sent, "events": passage.events}
        about = [(b"content-type", b"application/json"), (b"x-quire-route", _encode(self.route))]
        return "POST /internal/resume", about, _encode(body)


class Relay(Response):
    """The answer to one request, from one replica or from several.

    Raises HttpError if no replica answers before something was sent; later errors are the stream's last event.
    """

    def __init__(
        self, request: Request, replicas: Replicas, tally: Tally, config: RouteConfig, live: set[Relay]
    ) -> None:
        self._request, self._replicas, self._tally = request, replicas, tally
        self._config, self._live = config, live
        self._passage = Passage()
        self._task: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self._started = False
        self._kind = self._crossed = ""
        self._moves = self._engines = 0
        self._busy: set[int] = set()
        self._refusal: HttpError | None = None  # of the last that is busy

    def fail(self, error: Exception) -> None:
        """End the answer with an error, or because its client has gone."""
        self._error = self._error or error
        if self._task is not None:
            self._task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        direct: Send = scope.get("quire.send", send)
        outcome = "failed"
        self._live.add(self)
        # In its own task, so that each event does not wake all the layers above.
        self._task = asyncio.create_task(self._run(send, direct))
        try:
            async with watched(receive, self):
                await self._task
            outcome = "moved" if self._moves else "answered"
            if self._moves and self._passage.marks and random.random() < self._config.verify_failover:
                await self._compare()
        except (asyncio.CancelledError, QuireError) as ended:
            error = self._error or ended
            if isinstance(error, Disconnected):
                outcome = "disconnected"
            elif not self._started or not isinstance(error, QuireError):
                raise error from None
            else:
                log.warning("%s ends with an error: %s", self._request.id, error)
                await _send(direct, self._error_event(as_http(error)), last=True)
        finally:
            self._live.discard(self)
            self._tally.count("requests", outcome)

    async def _run(self, send: Send, direct: Send) -> None:
        """Ask replicas, one after the other, until the answer has come to its end."""
        while True:
            member, booking = await self._choose(direct)
            begun = False
            try:
                asked = self._request.on(self._passage) if self._passage.marks else self._request.first()
                async with member.upstream.asked(member.message(*asked)) as connection:
                    begun = connection.status == 200
                    if load := connection.header(b"x-quire-load"):
                        self._replicas.word(member, load)
                    await self._answer(member, connection, send, direct)
                return
            except Lost as lost:
                self._lost(member, lost)
            finally:
                self._replicas.end(booking, computed=begun)

    # --- where to

    async def _choose(self, send: Send) -> tuple[Member, Booking]:
        """Find a replica; wait for one while none is up."""
        until = time.monotonic() + self._config.failover_timeout
        while (found := self._find()) is None:
            if self._refusal and self._busy and not self._started:  # all that are up refuse
                raise self._refusal
            self._busy.clear()
            if (left := until - time.monotonic()) <= 0:
                self._tally.count("refusals", "no replica")
                raise unavailable("no replica can answer now: send this request again later", 5)
            await self._replicas.changed(min(WAIT_SECONDS, left))
            if self._started:
                await _send(send, KEEP_ALIVE)
        kind = found[0].kind_of(self._request.model)
        if self._kind not in ("", kind):
            self._crossed = kind
            self._tally.count("moves", "crossed")
            if self._started:
                await _send(send, b": quire crossed " + kind.encode() + b"\n\n")
        self._kind = kind
        return found

    def _find(self) -> tuple[Member, Booking] | None:
        """Choose in the class of the first replica, else in any if that is allowed."""
        began = time.perf_counter()
        model = self._request.model if self._replicas.knows(self._request.model) else ""
        kinds = [self._kind, ""] if self._config.failover_across == "allow" else [self._kind]
        for kind in dict.fromkeys(kinds):
            ask = msgspec.structs.replace(self._request.ask, pool=label(model, kind))
            if found := self._replicas.choose(ask, self._busy):
                self._tally.decisions.observe(time.perf_counter() - began)
                return found
        return None

    def _lost(self, member: Member, lost: Lost) -> None:
        """Count what happened; raises what ends the request."""
        if lost.cause != "busy":
            self._replicas.failed(member, lost.cause, str(lost))
        self._engines += lost.cause == "engine"
        if self._engines >= MOST_ENGINES:
            raise _failed(f"{self._engines} engines died while this request ran", 500)
        self._moves += lost.cause not in ("busy", "refused")
        self._tally.count("moves" if self._passage.events else "retries", lost.cause)
        if self._moves > MOST_MOVES:
            raise _failed(f"this request was moved {MOST_MOVES} times, and its replica failed again")

    # --- one replica

    async def _answer(self, member: Member, connection: Connection, send: Send, direct: Send) -> None:
        """Pass an answer on. Raises Lost if it must be asked of another replica."""
        headers = [pair for pair in connection.headers if pair[0] in SENT_BACK]
        start = {"type": "http.response.start", "status": connection.status, "headers": headers}
        if connection.header(b"content-type").startswith(b"text/event-stream") and connection.status == 200:
            if not self._started:
                self._started = True
                await send(start)
            await self._stream(member, connection, direct)
            return
        body = await connection.rest()
        self._check(member, connection)
        if self._started:
            raise _failed(f"a replica did not go on with this stream (status {connection.status})")
        headers.append((b"content-length", b"%d" % len(body)))
        if self._crossed:
            headers.append((b"x-quire-crossed", self._crossed.encode()))
        await send(start)
        await _send(send, body, last=True)

    def _check(self, member: Member, connection: Connection) -> None:
        """Raise Lost for an answer that another replica may give better."""
        status = connection.status
        if status in (401, 403):
            raise Lost("killed", "it does not take this router's key")
        if status == 503:
            self._refusal = _failed("a replica failed on this request", status)
            if retry := connection.header(b"retry-after"):
                self._refusal.headers["Retry-After"] = retry.decode("latin-1")
            self._busy.add(member.index)
            raise Lost("busy", "it takes no more requests")
        if status == 502:
            raise Lost("killed", "it answers 502")
        if status == 500 and (moved := connection.header(b"x-quire-moved")):
            raise Lost(moved.decode("latin-1"), "it gave an answer up")

    async def _stream(self, member: Member, connection: Connection, send: Send) -> None:
        passage = self._passage
        reader = Reader(passage, lambda told: self._replicas.word(member, told))
        try:
            while data := await connection.take():
                passed = reader.feed(data)
                connection.signs = reader.signs
                if passed:
                    await _send(send, passed)
                if reader.moved:
                    raise Lost(reader.moved, "it gave a stream up")
            if not passage.ended:
                raise Lost("killed", "a stream ended before its end")
        except DiffersError:
            self._tally.count("checks", "differed")
            raise
        except Lost:
            if not passage.ended:
                raise
        await _send(send, b"", last=True)

    async def _compare(self) -> None:
        """Ask the same once more, and compare the tokens with those of the stream that was moved."""
        if (found := self._find()) is None:
            return
        (member, booking), again = found, Passage()
        reader = Reader(again, lambda told: None)
        try:
            async with member.upstream.asked(member.message(*self._request.first())) as connection:
                while data := await connection.take():
                    reader.feed(data)
        except Lost as lost:
            log.warning("%s could not be compared: %s", self._request.id, lost)
        finally:
            self._replicas.end(booking, computed=True)
        if again.ended:
            same = _tokens(again.sent) == _tokens(self._passage.sent)
            self._tally.count("checks", "equal" if same else "differed")
            if not same:
                log.error("%s: another run of this request made other tokens", self._request.id)

    def _error_event(self, error: HttpError) -> bytes:
        """Write the event that ends a stream with an error."""
        path, info = self._request.path, error.info
        if is_anthropic(path, NoHeaders()):
            return event(msgspec.Raw(error_body(error, self._request.id)), "error")
        if path == "/v1/responses":
            told = {"sequence_number": self._passage.events, "code": info.code, "message": info.message}
            return event({"type": "error", **told}, "error")
        return event(msgspec.Raw(error.body()))


async def _send(send: Send, data: bytes, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": not last})


def _failed(message: str, status: int = 502) -> HttpError:
    return HttpError(status, ErrorInfo(message, "engine_error", None, "engine_error"))


def _tokens(marks: list[str]) -> dict[tuple[int, int], list[int]]:
    """Read the tokens of each sample from marks."""
    found: dict[tuple[int, int], list[int]] = {}
    for mark in marks:
        place, index, tokens, *_ = msgspec.msgpack.decode(b64decode(mark))
        found.setdefault((place, index), []).extend(tokens)
    return found
