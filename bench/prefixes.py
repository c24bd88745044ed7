"""Prefix hits, counted: the share of prompt tokens that four traces do not compute, by model.

    python bench/prefixes.py MODEL [MODEL ...] --memory-mib 64 --scale 1

The traces: a conversation of 20 turns, requests that share a long prompt, a tree of documents and questions, best of 8.
Beside the share: milliseconds to the first token of the last prompt of each trace, warm and cold, and the bytes of
snapshots. Tokens are drawn, so any weights do; give a hybrid and an attention model of the same size to compare them.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

from quire import LLM, SamplingParams

Prompt = list[int]


class Run:
    """A model and what it has computed of a trace."""

    def __init__(self, model: str, memory: int) -> None:
        options: dict[str, Any] = {
            "kv_cache_memory_bytes": memory,
            "max_num_seqs": 8,
            "skip_tokenizer_init": True,
        }
        self.llm = LLM(model, **options)
        self.cold = LLM(model, **options, enable_prefix_caching=False)
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

    def first_token(self, llm: LLM) -> float:
        params = SamplingParams(max_tokens=1, temperature=0.0)
        asked: Any = {"prompt_token_ids": self.last}
        start = time.perf_counter()
        llm.generate(asked, params, use_tqdm=False)
        return time.perf_counter() - start


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


TRACES: tuple[Callable[[Run, float], None], ...] = (conversation, shared_prompt, documents, best_of)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--memory-mib", type=int, default=64, help="KV cache and states together")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all lengths")
    options = parser.parse_args()
    print("| model | trace | not computed | first token warm | cold | snapshots |\n|---|---|---|---|---|---|")
    for model in options.models:
        run = Run(model, options.memory_mib << 20)
        for trace in TRACES:
            run.llm.reset_prefix_cache()
            before = run.llm.stats()
            trace(run, options.scale)
            after = run.llm.stats()
            queries = after.prefix_queries - before.prefix_queries
            share, held = (after.prefix_hits - before.prefix_hits) / queries, after.snapshot_bytes
            warm, cold = run.first_token(run.llm), run.first_token(run.cold)
            times = f"{warm * 1e3:.1f} ms | {cold * 1e3:.1f} ms"
            print(
                f"| {model.rstrip('/').split('/')[-1]} | {trace.__name__} | {share:.3f} | {times} | {held:,} |"
            )
        run.llm.shutdown()
        run.cold.shutdown()


if __name__ == "__main__":
    main()
