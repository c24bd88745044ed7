"""`python -m quire.entrypoints.openai.api_server --model M ...`: the same as `quire serve M ...`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from quire.cli import main as run


def as_serve(argv: Sequence[str]) -> list[str]:
    """The arguments of `quire`: `--model M` or `--model=M` becomes the first argument of `serve`."""
    model: list[str] = []
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--model":
            model = [value for value in (next(words, None),) if value is not None]
        elif word.startswith("--model="):
            model = [word.removeprefix("--model=")]
        else:
            rest.append(word)
    return ["serve", *model, *rest]


def main(argv: Sequence[str] | None = None) -> None:
    run(as_serve(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    main()
