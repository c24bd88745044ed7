"""Graphs: the launches of a step of one size, kept with their arguments and replayed as a whole."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from quire.devices.cuda.launch import Launch, Launcher
from quire.errors import EngineError

if TYPE_CHECKING:
    from quire.devices.cuda.record import Call
    from quire.devices.cuda.step import CudaStep

log = logging.getLogger("quire.devices")
Work = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Piece:
    """Operations side by side that a graph holds, or that the host takes part in."""

    calls: Sequence[Call]
    by_host: bool


def pieces(calls: Sequence[Call], by_host: Callable[[Call], bool]) -> list[Piece]:
    """Cut operations wherever the host takes part."""
    return [Piece([*group], host) for host, group in groupby(calls, by_host)]


class Graphs:
    """Captures pieces of a step at their first use, which runs them too, and replays them after that.

    Steps are padded to the least of `sizes` tokens that holds them. Launches of captured pieces go to `run`.
    """

    def __init__(self, sizes: Sequence[int], run: Launcher, device: Any) -> None:
        self.sizes, self.run = sorted(sizes), run
        self._capture: Callable[[Work], Work | None] = _captured
        self._captures = True
        if device.type == "cpu" and sizes:
            self.run = tape = Tape(run)
            self._capture = tape.capture
        elif device.type == "cuda":  # one replay at a time, so all may use the same memory within
            self._capture = partial(_captured, pool=torch.cuda.graph_pool_handle())
        else:
            self.sizes = []
        self._replays: dict[tuple[Any, ...], Work] = {}
        self._pieces: dict[tuple[Any, ...], list[Piece]] = {}
        self._version = 0

    def size_of(self, count: int) -> int:
        """The size of a step of `count` tokens or rows; 0: it is launched kernel by kernel."""
        place = bisect_left(self.sizes, count)
        return self.sizes[place] if count and place < len(self.sizes) else 0

    def forget_all_but(self, version: int) -> None:
        """Forget graphs of steps with adapters, but those of a version of them."""
        if version != self._version:
            self._version = version
            kept = [key for key in self._replays if key[2] in (None, version)]
            self._replays = {key: self._replays[key] for key in kept}

    def run_step(
        self,
        key: tuple[Any, ...] | None,
        calls: Sequence[Call],
        step: CudaStep,
        by_host: Callable[[Call], bool],
    ) -> None:
        """Launch operations over a step: those for the host, and others as graphs under a key; None: one by one."""
        if key is None:
            return launched(calls, step)
        if key[:2] not in self._pieces:  # of a part of steps of a size
            self._pieces[key[:2]] = pieces(calls, by_host)
        for index, piece in enumerate(self._pieces[key[:2]]):
            if not piece.by_host:
                self.launch((*key, index), partial(launched, piece.calls, step))
            elif len(step.inputs.tokens_T):  # padding alone is captured
                launched(piece.calls, step)
        return None

    def launch(self, key: tuple[Any, ...], work: Work) -> None:
        """Do work that is captured under a key. A GPU that cannot capture it is asked no more, and works one by one.

        Steps are padded all the same, as other ranks do, whose graphs have the launches of this one's work.
        """
        if key in self._replays:
            return self._replays[key]()
        if not self._captures:
            return work()
        again = self._capture(work)
        if again is None:
            self._captures = False
        else:
            self._replays[key] = again
        return None


def launched(calls: Sequence[Call], step: CudaStep) -> None:
    """Launch operations over a step."""
    try:
        for call in calls:
            call(step)
    finally:
        step.forget()


def _captured(work: Work, pool: Any = None) -> Work | None:
    """Do work, so that its kernels are compiled, and capture it on a stream of its own; None if the GPU refuses."""
    work()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
            work()
    except RuntimeError as error:
        log.warning("no graph of a step can be captured, so kernels are launched one by one: %s", error)
        return None
    return graph.replay


class Tape:
    """The interpreter's graphs: launches and operations of torch over the tensors that they had when captured.

    Whatever a replay reads must lie where it lay then, and no value may come to the host between. So a test of replays
    finds what would go stale in a graph of a GPU.
    """

    def __init__(self, run: Launcher) -> None:
        self._run, self.target, self._idle = run, run.target, False
        self._taken: list[Work] | None = None

    def __call__(self, launch: Launch) -> None:
        if self._taken is not None:
            self._taken.append(partial(self._run, launch))
        if not self._idle:
            with _disable_current_modes():
                self._run(launch)

    def capture(self, work: Work) -> Work:
        """Do work twice, as a GPU does: the first time without kernels."""
        self._idle = True
        work()
        self._idle = False
        taken: list[Work] = []
        self._taken = taken
        with _Taken(taken):
            work()
        self._taken = None

        def replay() -> None:
            for again in taken:
                again()

        return replay


class _Taken(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations of torch, to be done again into the tensors that they made."""

    def __init__(self, taken: list[Work]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._taken = taken

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise EngineError("a captured step reads a value of the device")
        made = func(*args, **(kwargs or {}))
        self._taken.append(partial(_again, func, args, kwargs or {}, made))
        return made


def _again(func: Any, args: Any, kwargs: Any, made: Any) -> None:
    found = func(*args, **kwargs)
    for old, new in zip(*(x if isinstance(x, (list, tuple)) else [x] for x in (made, found)), strict=True):
        if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)
