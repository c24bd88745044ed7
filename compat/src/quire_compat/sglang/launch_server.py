"""Serve with SGLang's options: `python -m sglang.launch_server`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from quire.cli import report_errors
from quire.serve.options import split_options
from quire.serve.server import serve
from quire_compat.sglang.flags import parsed, read_options

log = logging.getLogger("quire")
DEFAULTS = {"host": "127.0.0.1", "port": 30000}


def main(argv: Sequence[str] | None = None, prog: str = "launch_server") -> None:
    """Serve until a signal. Errors are printed as one line, with exit status 1."""
    args = list(sys.argv[1:] if argv is None else argv)
    report_errors(lambda: _serve(prog, args), prog, args)


def _serve(prog: str, args: Sequence[str]) -> None:
    options, notices = read_options({**DEFAULTS, **parsed(prog, args)})
    for notice in notices:
        log.warning("%s", notice)
    if status := serve(*split_options(options)):
        raise SystemExit(status)


if __name__ == "__main__":
    main()
