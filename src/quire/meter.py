"""Measures long work and tells of it from a thread of its own: a bar on a terminal, or lines of a log."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any, Literal, TextIO

from quire.errors import RequestError
from quire.progress import Told, untold
from quire.progress import log as log

SOON, EVERY, REDRAW = 1.0, 10.0, 0.5
"""After SOON seconds work is told of; a log has another line after EVERY, a bar is drawn again after REDRAW seconds."""
WIDTH = 20
CLEAR = "\r\x1b[K"

Wait = Callable[[float], bool]
"""Wait returns whether the work ended, after the given seconds at most."""


@dataclass(slots=True)
class Work:
    """Work of `total` bytes, or of things with a name such as "requests"; None: nobody knows how much."""

    label: str
    total: int | None
    unit: str
    clock: Callable[[], float] = time.monotonic
    count: Callable[[], int] | None = None  # what is done, where nobody tells it
    done: int = 0
    began: float = 0.0

    def advance(self, count: int) -> None:
        self.done += count

    def line(self) -> str:
        """Say what is done, as in "loading M: 3.1 GB of 8.2 GB (38%), 20 s left"."""
        seconds = self.clock() - self.began
        self.done = self.done if self.count is None else self.count()
        if self.total is None:
            return f"{self.label}: {seconds:.0f} s"
        share = self.share()
        if self.unit:
            amount = f"{self.done:,} of {self.total:,} {self.unit}"
        else:
            amount = f"{in_bytes(min(self.done, self.total))} of {in_bytes(self.total)}"
        left = f", {seconds * (1 - share) / share:.0f} s left" if share else ""
        return f"{self.label}: {amount} ({share:.0%}){left}"

    def share(self) -> float:
        return min(1.0, self.done / self.total) if self.total else 0.0


@contextmanager
def telling(work: Work, bar: bool = True) -> Iterator[Told]:
    """Tell of work until the block ends, in the log or on the terminal. `bar` False: something else draws there."""
    logs = log.isEnabledFor(logging.INFO)
    if not logs and not (bar and draws()):
        yield untold
        return
    work.began, ended = work.clock(), Event()
    teller = Thread(target=write_lines if logs else draw_bar, args=(work, ended.wait), daemon=True)
    teller.start()
    try:
        yield work.advance
    finally:
        ended.set()
        teller.join()


@contextmanager
def shown(total: int, use_tqdm: Literal[True] | Callable[..., Any]) -> Iterator[Told]:
    """Show how many of a call's requests have finished; a class like tqdm takes the place of Quire's own bar."""
    if use_tqdm is True:
        with telling(Work("generating", total, "requests")) as told:
            yield told
        return
    if not callable(use_tqdm):
        raise RequestError(
            f"use_tqdm must be True, False or a class like tqdm, got {use_tqdm!r:.80}", "use_tqdm"
        )
    bar = use_tqdm(total=total, desc="Processed prompts")
    try:
        yield bar.update
    finally:
        bar.close()


def takes_codes(stream: TextIO) -> bool:
    """Whether a stream is a terminal that knows escape codes."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def draws() -> bool:
    """Whether bars are drawn: on standard error, if it is a terminal."""
    return takes_codes(sys.stderr)


def redrawn(text: str) -> str:
    """Write `text` in place of a terminal's line, cut at its width."""
    return CLEAR + text[: shutil.get_terminal_size().columns - 1]


def write_lines(work: Work, wait: Wait) -> None:
    """Log how far the work is until it ends."""
    seconds = SOON
    while not wait(seconds):
        log.info("%s", work.line())
        seconds = EVERY


def draw_bar(work: Work, wait: Wait) -> None:
    """Draw how far the work is in one line of the terminal until it ends, then clear the line."""
    if wait(SOON):
        return
    while True:
        said, filled = work.line(), round(WIDTH * work.share())
        line = f"[{'#' * filled}{'-' * (WIDTH - filled)}] {said}"
        print(redrawn(line), end="", file=sys.stderr, flush=True)
        if wait(REDRAW):
            print(CLEAR, end="", file=sys.stderr, flush=True)
            return


def in_bytes(size: int) -> str:
    """Write a number of bytes as the hub does, in powers of ten."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"
