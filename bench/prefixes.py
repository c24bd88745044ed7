"""Prefix hits, counted: the share of prompt tokens that four traces do not compute, by model.

    python bench/prefixes.py [SHAPE or MODEL ...] [--only conversation] [--memory-mib 256] [--scale 1]

The traces: a conversation of 20 turns, requests that share a long prompt, a tree of documents and questions, best of 8.
Beside the share: milliseconds to the first token of the last prompt of each trace, warm and cold, and the bytes of
snapshots. Tokens are drawn, so any weights do.

A SHAPE of bench/shapes.py (default: all) has one period of its layers, with small MLPs and tables, and an attention
model with as many parameters beside it, which runs first: `of dense` is the share beside that model's. A MODEL is any
checkpoint.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shapes import PERIODS, dense_beside, small, write

from quire import LLM, SamplingParams

Prompt = list[int]
Trace = Callable[["Run", float], None]


class Run:
    """A model and what it has computed of a trace."""

    def __init__(self, model: str | Path, memory: int, dummy: bool) -> None:
        options: dict[str, Any] = {
            "kv_cache_memory_bytes": memory,
            "max_num_seqs": 8,
            "skip_tokenizer_init": True,
            "load_format": "dummy" if dummy else "auto",
        }
        self.llm = LLM(str(model), **options)
        self.rng = random.Random(0)
        self.last: Prompt = []

    def text(self, count: int) -> Prompt:
        return [self.rng.randrange(10, 90) for _ in range(count)]

    def ask(self, prompts: list[Prompt], max_tokens: int = 16, n: int = 1) -> list[Prompt]:
        params = SamplingParams(n=n, max_tokens=max_tokens, temperature=1.0, seed=1, ignore_eos=True)
        asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = self.llm.generate(asked, params, use_tqdm=False)
        self.last = prompts[-1]
        return [list(one.outputs[0].token_ids) for one in found]

    def first_token(self) -> float:
        params = SamplingParams(max_tokens=1, temperature=0.0)
        asked: Any = {"prompt_token_ids": self.last}
        start = time.perf_counter()
        self.llm.generate(asked, params, use_tqdm=False)
        return time.perf_counter() - start

    def measure(self, trace: Trace, scale: float) -> tuple[float, list[str]]:
        """Return the share, and the cells of a table: the share, times to the first token, bytes of snapshots."""
        self.llm.reset_prefix_cache()
        before = self.llm.stats()
        trace(self, scale)
        after = self.llm.stats()
        share = (after.prefix_hits - before.prefix_hits) / (after.prefix_queries - before.prefix_queries)
        warm = self.first_token()
        self.llm.reset_prefix_cache()
        cold = self.first_token()
        return share, [
            f"{share:.3f}",
            f"{warm * 1e3:.1f} ms",
            f"{cold * 1e3:.1f} ms",
            f"{after.snapshot_bytes:,}",
        ]


def conversation(run: Run, scale: float) -> None:
    tokens = run.text(int(200 * scale))
    for _ in range(20):
        (said,) = run.ask([tokens], 32)
        tokens = [*tokens, *said, *run.text(int(40 * scale))]


def shared_prompt(run: Run, scale: float) -> None:
    shared = run.text(int(2048 * scale))
    for _ in range(64):
        run.ask([[*shared, *run.text(int(60 * scale))]])


def documents(run: Run, scale: float) -> None:
    system = run.text(int(300 * scale))
    books = [[*system, *run.text(int(900 * scale))] for _ in range(4)]
    for _ in range(6):
        run.ask([[*book, *run.text(int(30 * scale))] for book in books])


def best_of(run: Run, scale: float) -> None:
    for _ in range(4):
        run.ask([run.text(int(600 * scale))], n=8)


TRACES: tuple[Trace, ...] = (conversation, shared_prompt, documents, best_of)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(PERIODS))
    parser.add_argument(
        "--only", nargs="+", choices=[trace.__name__ for trace in TRACES], help="these traces"
    )
    parser.add_argument("--memory-mib", type=int, default=256, help="KV cache and states together")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all lengths")
    options = parser.parse_args()
    traces = [trace for trace in TRACES if not options.only or trace.__name__ in options.only]
    titles = ["model", "trace", "not computed", "first token warm", "cold", "snapshots", "of dense"]
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|", flush=True)
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            runs = {name.rstrip("/").split("/")[-1]: Path(name)}
            if name in PERIODS:
                config = small(name)
                hybrid = write(Path(folder, "hybrid"), config)
                runs = {
                    f"dense beside {name}": dense_beside(Path(folder, "dense"), config, hybrid),
                    name: hybrid,
                }
            dense: dict[str, float] = {}
            for title, path in runs.items():
                run = Run(path, options.memory_mib << 20, name in PERIODS)
                for trace in traces:
                    share, cells = run.measure(trace, options.scale)
                    known = dense.setdefault(trace.__name__, share)
                    cells.append(f"{share / known:.3f}" if title == name else "")
                    print(f"| {' | '.join([title, trace.__name__, *cells])} |", flush=True)
                run.llm.shutdown()


if __name__ == "__main__":
    main()
