"""AdapterArena: the adapters in memory, the requests that use them, and loading and eviction.

Adapters are loaded on a thread of their own while steps go on. This gate holds a request until its adapter is in
memory, and pins it from then to its end. If no slot is free, the adapter that was used least recently and that nobody
uses makes room. Knows digests and requests; knows no weights.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Generic, TypeVar

from quire.engine.verbs import LoadAdapter, UnloadAdapter
from quire.errors import EngineError, ModelError, QuireError
from quire.shares import next_to_go
from quire.types import Request

A = TypeVar("A")

LOAD_SECONDS = 60.0
"""LOAD_SECONDS is the longest load of an adapter that is not pinned."""
REMEMBER_SECONDS = 60.0
"""REMEMBER_SECONDS pass before an adapter that could not be loaded is read again as it is."""
MOST_FAILURES = 256
MOST_FILES = 64


class AdapterArena(Generic[A]):
    """`slots` adapters of a model.

    `read` opens an adapter's directory and returns its digest and what `place` puts into a slot. `place` may be called
    from any thread and returns bytes.
    """

    def __init__(
        self,
        slots: int,
        read: Callable[[Path], tuple[str, Callable[[], A]]],
        place: Callable[[int, A | None], int],
    ) -> None:
        self._read, self._place = read, place
        self._free = list(range(slots - 1, -1, -1))
        self._resident: OrderedDict[str, int] = OrderedDict()  # slot by digest, least recently used first
        self._paths: dict[str, str] = {}  # of residents
        self._users: Counter[str] = Counter()
        self._requests: dict[str, tuple[str, int]] = {}  # digest, and samples that still run
        self._pinned: set[str] = set()
        self._unwanted: set[str] = set()  # leave once nobody uses them
        self._loading: dict[str, Future[None]] = {}
        self._held: dict[str, Future[None]] = {}  # loads, by request
        self._queued: dict[str, Future[None]] = {}  # requests that wait for a slot, in order
        self._lock = threading.RLock()
        self._owners: dict[str, str] = {}  # who used or loaded a resident last
        self._failures: dict[Hashable, tuple[float, Exception]] = {}  # of loads, by directory, oldest first
        # Adapters that requests know were loaded before: no new one keeps them waiting.
        self._thread = ThreadPoolExecutor(1, "quire-adapters")
        self._new = ThreadPoolExecutor(1, "quire-new-adapters")
        self.nbytes: dict[str, int] = {}

    @property
    def residents(self) -> list[str]:
        """List the digests of the adapters in memory, least recently used first."""
        return list(self._resident)

    def slot_of(self, digest: str) -> int:
        """Return the slot of an adapter that a running request pins."""
        return self._resident[digest]

    # --- operators

    def load(self, verb: LoadAdapter) -> Future[str]:
        """Check an adapter's files and load it if a slot is free or can be made so; the result is its digest.

        ModelError if it cannot be loaded, EngineError if no slot is left to pin it in. A failure is remembered for
        REMEMBER_SECONDS, unless the files change.
        """

        def work() -> str:
            state, now = _state_of(verb.path), time.monotonic()
            failed = self._failures.get(state)
            if failed is not None and now < failed[0]:
                raise failed[1]
            try:
                return self._load(verb, now + LOAD_SECONDS)
            except QuireError as error:
                self._failures.pop(state, None)
                self._failures[state] = time.monotonic() + REMEMBER_SECONDS, error
                if len(self._failures) > MOST_FAILURES:
                    del self._failures[next(iter(self._failures))]
                raise

        return self._new.submit(work)

    def _load(self, verb: LoadAdapter, deadline: float) -> str:
        path, pin = verb.path, verb.pin
        digest, make = self._read(Path(path))
        build = cache(make)
        if digest not in self._resident:
            build()  # it may take long: it has no slot yet
        if not pin and time.monotonic() > deadline:
            raise EngineError(
                f"{path}: it takes more than {LOAD_SECONDS:g} s to load: make the adapter smaller"
            )
        with self._lock:
            self._unwanted.discard(digest)
            resident = digest in self._resident
            slot = None if resident else self._take_slot()
            if pin and slot is None and not resident:
                raise EngineError("every slot of an adapter is in use or pinned: raise --max-cpu-loras")
        if slot is not None:  # else it was only checked: it is loaded once a request needs it
            self._fill(slot, digest, path, build)
        with self._lock:
            self._owners[digest] = verb.owner
            if pin:
                self._pinned.add(digest)
        return digest

    def unload(self, verb: UnloadAdapter) -> None:
        """Let go of an adapter once nobody uses it."""
        digest = verb.digest
        with self._lock:
            self._pinned.discard(digest)
            if self._users[digest]:
                self._unwanted.add(digest)
            else:
                self._evict(digest)

    def reload(self) -> None:
        """Load all residents anew, for a new executable. Those that fail are dropped."""
        with self._lock:
            for digest, slot in list(self._resident.items()):
                try:
                    self._place(slot, self._read_again(digest, self._paths[digest]))
                except QuireError:
                    if self._users[digest]:
                        raise
                    del self._resident[digest]
                    self._free.append(slot)

    # --- requests

    def hold(self, request: Request) -> Future[None] | None:
        """Pin the adapter of a request, or hold the request until the adapter is in memory."""
        if request.adapter is None:
            return None
        with self._lock:
            loading = self._held.get(request.id)
            if loading is None:
                # A request that waits for a slot must not be overtaken: users of other adapters would keep the slots.
                first = next(iter(self._queued), request.id) == request.id
                loading = self._begin(request) if first else None
                if loading is None:
                    return self._queued.setdefault(request.id, Future())
                self._queued.pop(request.id, None)
                self._held[request.id] = loading
            if not loading.done():
                return loading
            loading.result()
            del self._held[request.id]
        return None

    def remove(self, request_id: str) -> None:
        """Forget a request that was held."""
        self.release(request_id)

    def keep(self, request: Request) -> None:
        """Pin the adapter of a request until it ends."""
        if request.adapter is not None:
            with self._lock:
                self._requests[request.id] = request.adapter, request.sampling.n
                self._users[request.adapter] += 1
                self._owners[request.adapter] = request.owner
                if request.adapter in self._resident:
                    self._resident.move_to_end(request.adapter)

    def release(self, request_id: str, index: int | None = None) -> None:
        """Note that a sample, or a whole request, has ended. Unknown ids are ignored."""
        with self._lock:
            if index is None:
                self._held.pop(request_id, None)
                self._queued.pop(request_id, None)
            found = self._requests.get(request_id)
            if found is None:
                return
            digest, left = found
            if index is not None and left > 1:
                self._requests[request_id] = digest, left - 1
                return
            del self._requests[request_id]
            self._users[digest] -= 1
            if not self._users[digest]:
                del self._users[digest]
                if digest in self._unwanted:
                    self._unwanted.discard(digest)
                    self._evict(digest)

    # --- slots

    def _begin(self, request: Request) -> Future[None] | None:
        """Pin the adapter of a request and load it; None if there is no slot for it."""
        assert request.adapter is not None
        loading = self._bring(request.adapter, request.adapter_path)
        if loading is not None:
            self.keep(request)
        return loading

    def _bring(self, digest: str, path: str) -> Future[None] | None:
        """Load an adapter, unless it is there or being loaded; None if there is no slot for it."""
        if digest in self._loading and not self._loading[digest].done():
            return self._loading[digest]
        if digest in self._resident:
            done: Future[None] = Future()
            done.set_result(None)
            return done
        slot = self._take_slot()
        if slot is None:
            return None

        def work() -> None:
            with self._lock:
                if digest in self._resident:  # an operator's load was faster
                    self._free.append(slot)
                    return
            self._fill(slot, digest, path, partial(self._read_again, digest, path))

        self._loading[digest] = self._thread.submit(work)
        return self._loading[digest]

    def _read_again(self, digest: str, path: str) -> A:
        """Read an adapter whose digest is known. ModelError: its files have another one now."""
        found, build = self._read(Path(path))
        if found != digest:
            raise ModelError(files_changed(path))
        return build()

    def _fill(self, slot: int, digest: str, path: str, build: Callable[[], A]) -> None:
        try:
            nbytes = self._place(slot, build())
        except BaseException:
            with self._lock:
                self._free.append(slot)
            raise
        with self._lock:
            if digest in self._resident:  # the other thread was faster
                self._place(slot, None)
                self._free.append(slot)
                return
            self._resident[digest] = slot
            self._paths[digest], self.nbytes[digest] = path, nbytes

    def _take_slot(self) -> int | None:
        """Take a free slot, or the least recently used one of the owner with most; None if all are pinned."""
        if not self._free:
            idle = [one for one in self._resident if not self._users[one] and one not in self._pinned]
            if idle:
                self._evict(next_to_go((digest, self._owners.get(digest, ""), 1) for digest in idle))
        return self._free.pop() if self._free else None

    def _evict(self, digest: str) -> None:
        slot = self._resident.pop(digest, None)
        if slot is not None:
            self._place(slot, None)
            self.nbytes.pop(digest, None)
            self._owners.pop(digest, None)
            self._free.append(slot)


def _state_of(path: str) -> Hashable:
    """Name a directory as it is now: its files with their sizes and times."""
    try:
        files = sorted((entry.name, entry.stat()) for entry in os.scandir(path))
    except (OSError, ValueError):
        files = []
    return path, *((name, stat.st_size, stat.st_mtime_ns) for name, stat in files[:MOST_FILES])


def files_changed(path: str) -> str:
    """Make the message for an adapter whose digest differs from the one asked for."""
    return f"the files of the adapter {path} changed since it was loaded: load it again"
