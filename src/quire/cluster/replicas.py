"""The replicas of a router: their addresses, their health, their own word on load and cache. Chooses by `Choice`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from quire.cluster.choice import Ask, Choice
from quire.cluster.loads import Booking, Load, Replica, State
from quire.cluster.options import RouteConfig
from quire.errors import ConfigError
from quire.serve.threads import within
from quire.serve.upstream import Address, Headers, Lost, Upstream, message

log = logging.getLogger("quire.route")

PACE = 0.2
"""Seconds between two looks at a replica's load and cache."""
WORD_AGE = 0.01
"""Seconds before its coming that a word was written: what was sent since then is not in it."""
LOOK_AGAIN = 0.5
MOST_LOOKS = 100
"""Looks a second at replicas that are not there."""
STEADY, MOST_FLAPS, MOST_WAIT = 5.0, 2, 10.0
"""A replica that failed within STEADY seconds, more than MOST_FLAPS times, waits longer each time up to MOST_WAIT."""
ADDRESS_SECONDS = 1.0


class _Model(msgspec.Struct):
    kind: str = msgspec.field(name="class", default="")


class About(msgspec.Struct):
    """What a replica says of itself: its class of equal replicas, its models, the tokens that its cache holds."""

    kind: str = msgspec.field(name="class", default="")
    models: dict[str, _Model] = {}
    cache_tokens: int = 1 << 20


class _Told(msgspec.Struct):
    next: int
    reset: bool = False
    load: Load = Load()
    events: list[list[str]] = []


_about, _told = msgspec.json.Decoder(About), msgspec.json.Decoder(_Told)
_load = msgspec.json.Decoder(Load)


class Member(Replica):
    """One replica as this router knows it. `number` names it to those who may not see addresses."""

    def __init__(self, address: str, number: int, key: str) -> None:
        super().__init__(address, state="down")
        to = read_address(address)
        self.number, self.upstream = number, Upstream(to)
        self._fixed = f" HTTP/1.1\r\nhost: {to.shown}\r\nauthorization: Bearer {key}\r\n"
        self.about: About | None = None
        self.drained = False
        self.heard = self.again = 0.0
        self.flaps, self.why = 0, "not reached yet"
        self.task: asyncio.Task[None] | None = None

    def message(self, line: str, headers: Headers = (), body: bytes = b"") -> bytes:
        """Write a request to it, such as `GET /health`."""
        return message(f"{line}{self._fixed}".encode(), headers, body)

    @property
    def kind(self) -> str:
        """Its class; "" while it is away."""
        return self.about.kind if self.about else ""

    @property
    def models(self) -> dict[str, _Model]:
        return self.about.models if self.about else {}

    def kind_of(self, model: str) -> str:
        """Name the class of one of its models: an adapter has its own."""
        return (model in self.models and self.models[model].kind) or self.kind

    def __str__(self) -> str:
        return f"replica {self.number} ({self.name})"

    def describe(self) -> dict[str, object]:
        """Describe it to operators."""
        told = {"replica": self.number, "address": self.name, "state": self.state, "why": self.why}
        return {**told, "class": self.kind, "models": sorted(self.models), "running": len(self.upstream.live)}


def read_address(text: str) -> Address:
    """Read `http[s]://host[:port]`, `host:port` or `unix:/path`. ConfigError: it is none of these."""
    if text.startswith("unix:"):
        return Address("localhost", 80, unix=text.removeprefix("unix:"))
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--replica {text!r}: {error}") from error
    plain = not (parts.path.strip("/") or parts.query or parts.fragment or parts.username or " " in text)
    if parts.scheme not in ("http", "https") or not parts.hostname or not plain or port == 0:
        raise ConfigError(f"--replica must look like http://host:port or unix:/path, got {text!r}")
    if parts.scheme == "http":
        return Address(parts.hostname, port or 80)
    return Address(parts.hostname, port or 443, ssl.create_default_context())


def label(model: str, kind: str = "") -> str:
    """Name the pool of the replicas that have a model, of one class or of any."""
    return f"{model}\0{kind}" if kind else model


class Replicas:
    """All replicas, which `choice` chooses among. Raises ConfigError for a wrong address."""

    def __init__(self, choice: Choice[Member], config: RouteConfig) -> None:
        self.choice, self._config, self._silence = choice, config, config.silence_timeout
        self.members: dict[str, Member] = {}
        self._leaving: list[Member] = []  # no longer listed, but with streams
        self._seen, self._number = "", 0
        self._change = asyncio.Event()
        self.longest_silence = 0.0
        self._listed()

    # --- choosing

    @property
    def any_up(self) -> bool:
        return any(member.state == "up" for member in self.members.values())

    def knows(self, model: str) -> bool:
        """Whether a replica that was reached serves `model`."""
        return any(model in member.models for member in self.members.values())

    def choose(self, ask: Ask, excluded: Iterable[int] = ()) -> tuple[Member, Booking] | None:
        """Choose a replica and book the request there; None if none is up."""
        booking = self.choice.choose(ask, time.monotonic(), set(excluded))
        return None if booking is None else (self.choice.at(booking.index), booking)

    def end(self, booking: Booking, computed: bool) -> None:
        """Release a booking."""
        self.choice.end(booking, time.monotonic(), computed=computed)

    async def changed(self, seconds: float) -> None:
        """Wait until a replica changes its state, for a time at most."""
        with contextlib.suppress(asyncio.TimeoutError):
            await within(seconds, self._change.wait())

    # --- health

    def failed(self, member: Member, cause: str, why: str) -> None:
        """Note that a replica failed. If it fell silent, all who wait for its answers are told."""
        now = time.monotonic()
        if member.state == "up":
            member.flaps = member.flaps + 1 if now - member.since < STEADY else 0
        if why != member.why:
            log.log(logging.WARNING if member.about else logging.INFO, "%s is not used: %s", member, why)
        member.about, member.why = None, why
        member.again = now + min(MOST_WAIT, LOOK_AGAIN * 2 ** max(0, member.flaps - MOST_FLAPS))
        self._set(member, "ejected" if member.flaps > MOST_FLAPS else "down")
        if cause in ("silent", "frozen"):
            for connection in [*member.upstream.live]:
                connection.fail(Lost(cause, why))

    def word(self, member: Member, told: bytes) -> None:
        """Take a replica's word on its load."""
        with contextlib.suppress(msgspec.MsgspecError):
            member.word(_load.decode(told), time.monotonic(), WORD_AGE)

    def drain(self, number: int, drained: bool) -> Member | None:
        """Send a replica no new requests, or send it some again; None if there is no such replica."""
        found = next((member for member in self.members.values() if member.number == number), None)
        if found is not None:
            found.drained = drained
            if found.about is not None:
                self._set(found, "draining" if drained else "up")
        return found

    def _set(self, member: Member, state: State) -> None:
        if self.members.get(member.name) is member and state != member.state:
            self.choice.set_state(member.index, state, time.monotonic())
            self._change.set()
            self._change = asyncio.Event()

    # --- addresses

    def _listed(self) -> list[str]:
        """Read the addresses that are given and those in the file."""
        found, file = [*self._config.replica], self._config.replicas_file
        try:
            lines = Path(file).read_text().splitlines() if file is not None else []
        except (OSError, ValueError) as error:
            raise ConfigError(f"--replicas-file {file!r} cannot be read: {error}") from error
        found += filter(None, (line.partition("#")[0].strip() for line in lines))
        for text in found:
            read_address(text)
        return found

    async def _resolved(self) -> list[str]:
        """Ask DNS for addresses."""
        if (name := self._config.replicas_dns) is None:
            return []
        host, _, port = name.rpartition(":")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ConfigError(f"--replicas-dns {name!r}: {error}") from error
        return [f"[{a[4][0]}]:{port}" if ":" in str(a[4][0]) else f"{a[4][0]}:{port}" for a in found]

    async def run(self) -> None:
        """Follow addresses and health. Never returns."""
        next_look = 0.0
        try:
            while True:
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + ADDRESS_SECONDS
                    await self._look()
                self._find_silent()
                await asyncio.sleep(min(0.1, self._silence / 8))
        finally:
            for member in [*self.members.values()]:
                self._remove(member)

    async def _look(self) -> None:
        """Read the addresses again; what cannot be read changes nothing."""
        try:
            found = self._listed() + await self._resolved()
        except ConfigError as error:
            if str(error) != self._seen:
                log.warning("the list of replicas stays as it is: %s", error)
            self._seen = str(error)
            return
        for text in [text for text in dict.fromkeys(found) if text not in self.members]:
            self.members[text] = member = Member(text, self._number, self._config.router_api_key[0])
            self._number += 1
            self.choice.add(member)
            member.task = asyncio.get_running_loop().create_task(self._follow(member))
        for member in [one for text, one in self.members.items() if text not in found]:
            log.info("%s is no longer listed", member)
            self._remove(member)

    def _remove(self, member: Member) -> None:
        """Forget a replica. Its streams go on to their ends."""
        if member.task is not None:
            member.task.cancel()
        self._set(member, "down")
        member.about = None
        self._leaving.append(member)
        self.choice.remove(member.index)
        del self.members[member.name]
        member.upstream.close()

    def _find_silent(self) -> None:
        now = time.monotonic()
        self._leaving = [member for member in self._leaving if member.upstream.live]
        for member in [*self.members.values(), *self._leaving]:
            heard = [one.heard for one in member.upstream.live if one.signs and not one.paused]
            longest = now - min(heard, default=now)
            self.longest_silence = max(self.longest_silence, longest)
            # One that is late to tell its load, but whose streams go on, is only busy.
            away = now - max(member.heard, *heard, 0.0) if member.about else 0.0
            if max(longest, away) > self._silence:
                self.failed(member, "silent", f"it gave no sign of life for {self._silence:g} s")

    # --- one replica

    async def _follow(self, member: Member) -> None:
        number = 0
        while True:
            while (now := time.monotonic()) < member.again and self.any_up:
                await asyncio.sleep(min(LOOK_AGAIN, member.again - now))
            try:
                number = await (self._hear(member, number) if member.about else self._meet(member))
            except Lost as lost:
                if lost.cause != "silent" or member.about is None:
                    self.failed(member, lost.cause, str(lost))
            except msgspec.MsgspecError as error:
                self.failed(member, "killed", f"it does not answer as a replica of Quire does: {error}")
            await asyncio.sleep(PACE if member.about else max(PACE, len(self.members) / MOST_LOOKS))

    async def _meet(self, member: Member) -> int:
        """Get to know a replica that was away; returns the number of the next change of its cache."""
        await self._get(member, "/health")
        about = _about.decode(await self._get(member, "/internal/replica"))
        self.choice.prefixes.clear(member.index)
        self.choice.prefixes.add(member.index, about.cache_tokens)
        number = await self._hear(member, 0)
        others = {one.kind for one in self.members.values() if one.about} - {about.kind}
        if others:
            why = "where none of a stream's class is up it goes on in another, as --failover-across allows"
            log.warning("%s is of class %s, others are of %s: %s", member, about.kind, sorted(others), why)
        member.about = about
        kinds = [(model, member.kind_of(model)) for model in ("", *about.models)]
        self.choice.label(member.index, [label(model, kind) for model, own in kinds for kind in ("", own)])
        member.why = ""
        self._set(member, "draining" if member.drained else "up")
        log.info("%s is up: %s", member, ", ".join(about.models))
        return number

    async def _hear(self, member: Member, number: int) -> int:
        """Take what changed in its cache and its load; returns the number of the next change."""
        path = f"/internal/events?since={number}&wait=1&silence={self._silence}"
        told = _told.decode(await self._get(member, path))
        member.word(told.load, member.heard, WORD_AGE)
        if told.load.silent >= self._silence:
            raise Lost("frozen", f"its engine gave no sign of life for {self._silence:g} s")
        self.choice.prefixes.events(member.index, told.events, reset=told.reset)
        return told.next

    async def _get(self, member: Member, path: str) -> bytes:
        """Get a page of a replica. Lost: there is none."""
        try:
            status, body = await within(self._silence, member.upstream.whole(member.message(f"GET {path}")))
        except asyncio.TimeoutError:
            raise Lost("silent", f"no answer in {self._silence:g} s") from None
        member.heard = time.monotonic()
        if status == 200:
            return body
        why = {
            401: "it does not take this router's key: compare --router-api-key of both",
            404: f"it has no {path}: start it with --router-api-key",
        }
        raise Lost("killed", why.get(status, f"its {path} answers {status}"))
