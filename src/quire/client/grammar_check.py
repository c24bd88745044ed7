"""Compiles each constraint in a separate process within limits of time and memory, and caches the results.

Knows no HTTP. Whatever a constraint does to that process, only its own request fails, with a RequestError.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from contextlib import suppress

import msgspec

from quire.client.grammar_worker import Setup, Verdict, frame
from quire.config import EngineConfig
from quire.engine.wire import LENGTH
from quire.errors import EngineError, OverloadedError, RequestError
from quire.params import StructuredOutputsParams
from quire.shares import Turns
from quire.types import ModelCard

log = logging.getLogger("quire.grammar")

MAX_WAITING = 64
_FULL = "too many new constraints are waiting to be compiled: try again later"
MAX_REMEMBERED = 1024
MAX_REMEMBERED_BYTES = 32 << 20
START_TIMEOUT = 120.0
KILL_SECONDS = 2.0


class GrammarChecker:
    """Checks constraints in a process, which starts with the first and is replaced if it ends. For one event loop."""

    def __init__(self, config: EngineConfig, maker: str) -> None:
        self._config = config
        self._maker = maker
        self._process: Process | None = None
        self._busy = False
        self._waiting: Turns[asyncio.Future[None]] = Turns()
        self._known: OrderedDict[bytes, Verdict] = OrderedDict()
        self._size = 0

    async def check(self, params: StructuredOutputsParams, info: ModelCard, owner: str = "") -> str:
        """Compile a constraint to the grammar for `Request.grammar`. Owners take turns.

        RequestError: malformed, not supported, or too expensive. OverloadedError: too many constraints are waiting, and
        no other owner has more of them.
        """
        key = msgspec.msgpack.encode(params)
        verdict = self._known.get(key)
        if verdict is None:
            await self._turn(owner)
            try:
                verdict = self._known.get(key) or await self._ask(params, info)
            finally:
                self._pass_on()
            self._remember(key, verdict)
        if verdict.error is not None:
            raise RequestError(verdict.error, "structured_outputs")
        return verdict.text

    async def _turn(self, owner: str) -> None:
        """Wait for the owner's turn at the process."""
        if len(self._waiting) >= MAX_WAITING:
            largest = self._waiting.make_room(owner)
            if largest is None:
                raise OverloadedError(_FULL, 1)
            if not largest.done():
                largest.set_exception(OverloadedError(_FULL, 1))
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.put(owner, turn)
        if not self._busy:
            self._busy = True
            self._pass_on()
        try:
            await turn
        except BaseException:
            if turn.cancelled():
                self._waiting.drop(owner, turn)
            elif turn.exception() is None:  # cancelled when its turn had come
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Begin the next turn, if anybody waits."""
        while self._waiting:
            turn = self._waiting.next()
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False

    def _remember(self, key: bytes, verdict: Verdict) -> None:
        if key not in self._known:
            self._known[key] = verdict
            self._size += len(key) + len(verdict.text)
        self._known.move_to_end(key)
        while len(self._known) > MAX_REMEMBERED or self._size > MAX_REMEMBERED_BYTES:
            old, gone = self._known.popitem(last=False)
            self._size -= len(old) + len(gone.text)

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            # A pipe that somebody holds open must not hold up the next constraint.
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), KILL_SECONDS)

    async def _ask(self, params: StructuredOutputsParams, info: ModelCard) -> Verdict:
        process = await self._started(info)
        limit = self._config.grammar.grammar_timeout
        try:
            return await asyncio.wait_for(_exchange(process, frame(params)), limit)
        except asyncio.TimeoutError:
            why = f"takes more than {limit:g} s to compile (--grammar-timeout)"
        except (asyncio.IncompleteReadError, ConnectionError):
            why = f"takes more than {self._config.grammar.grammar_memory_mib} MiB to compile (--grammar-memory-mib)"
        except BaseException:  # cancelled: the next caller would read the pending reply
            await self.close()
            raise
        log.warning("a constraint %s: refused", why)
        await self.close()
        return Verdict(error=f"the constraint {why}: simplify it")

    async def _started(self, info: ModelCard) -> Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "quire.client.grammar_worker",
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,
        )
        memory = self._config.grammar.grammar_memory_mib << 20
        self._process = process
        try:
            setup = frame(Setup(self._maker, self._config, info, memory))
            await asyncio.wait_for(_exchange(process, setup), START_TIMEOUT)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.TimeoutError) as error:
            await self.close()
            raise EngineError("the process that compiles grammars does not start: see the log") from error
        except BaseException:
            await self.close()
            raise
        return process


async def _exchange(process: Process, data: bytes) -> Verdict:
    """Send a frame and read the answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(data)
    await process.stdin.drain()
    (size,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    return msgspec.msgpack.decode(await process.stdout.readexactly(size), type=Verdict)
