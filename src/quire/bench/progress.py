"""Shows a benchmark's progress on standard error. Only on a terminal: files and pipes get results alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)


@contextmanager
def progress(label: str, total: int | None = None, disable: bool = False) -> Iterator[Callable[[], None]]:
    """Show a bar, or without `total` a spinner, until the block ends. Call the function after each part."""
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    if total is None:
        columns = [SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()]
    console = Console(stderr=True)
    bar = Progress(
        *columns,
        console=console,
        refresh_per_second=2,
        transient=True,
        disable=disable or not sys.stderr.isatty() or console.is_dumb_terminal,
    )
    with bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)
