"""Run `python -m bench.article NAME` from the root of a checkout."""

from __future__ import annotations

from quire.cli import Program, main

HELP = "Measure a figure that articles give for engines."

if __name__ == "__main__":
    main(program=Program.single("python -m bench.article", "bench.article.command", HELP))
