"""Verbs: an operator's commands to an engine. They cross client, channel and core as they are.

A new verb is a struct here, a handler where its state lives (`EngineCore.handlers`), and an endpoint or a method.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Say that the engine goes on; every reply carries fresh statistics."""


class ResetPrefixCache(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Forget cached prefixes, except those that running sequences hold. The answer is True: it always succeeds.

    With `reset_running`, running sequences give up theirs too and compute their tokens again.
    """

    reset_running: bool = False


class Sleep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Compute nothing until WakeUp. Level 1 gives the KV cache back, level 2 the weights too, level 0 nothing.

    `mode` says what happens to running requests: "abort" ends them, "wait" lets them finish first, "keep" goes on
    with them afterwards, computing their tokens again. Programs end under "abort" and are finished first otherwise.
    The answer is True: the engine sleeps.
    """

    level: int = 1
    mode: str = "abort"


class WakeUp(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Take memory again and go on. `tags` ("weights", "kv_cache") takes only these parts.

    The engine sleeps until it has both parts; the answer is whether it still sleeps.
    """

    tags: tuple[str, ...] | None = None


class StartProfile(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Trace steps until StopProfile: from the `delay`-th on, at most `most` of them (0: no limit).

    `prefix` begins the name of the trace's file.
    """

    prefix: str | None = None
    delay: int = 0
    most: int = 0


class StopProfile(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Write the trace. The answer is its path, None if none was started."""


class LoadAdapter(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Load an adapter's directory for `owner`, and with `pin` keep it in memory. The answer is its files' digest."""

    path: str
    pin: bool = False
    owner: str = ""


class UnloadAdapter(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Let go of an adapter once no request uses it."""

    digest: str


class Identify(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Tell the digest of everything that answers depend on: the same for engines that answer alike."""


Verb = (
    Ping | ResetPrefixCache | Sleep | WakeUp | StartProfile | StopProfile | LoadAdapter | UnloadAdapter | Identify
)  # fmt: skip
Result = bool | str | None
Handler = Callable[[Any], "Result | Future[str]"]
"""Obeys a verb, now or (a Future) beside the steps. QuireError if it cannot."""
