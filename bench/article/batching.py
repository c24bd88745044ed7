"""Batches that are filled once, filled at each step, and filled at each step with prompts in chunks."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from bench.article.lengths import conversations
from bench.article.study import GUIDE, Claim, Result, Setting, Study, seconds, seconds_apart
from quire.llm import LLM

SLOTS = 8
LONGEST = 512
CHUNK = 128


def in_batches(llm: LLM, prompts: list[Any], counts: list[int]) -> float:
    """Each batch starts when the longest output of the one before has ended."""
    parts = range(0, len(prompts), SLOTS)
    return sum(seconds(llm, prompts[i : i + SLOTS], counts[i : i + SLOTS]) for i in parts)


def measure(setting: Setting) -> Result:
    lengths = conversations(setting.data, setting.count(64, SLOTS), LONGEST)
    tokens = sum(output for _, output in lengths)
    runs: dict[str, tuple[Callable[..., float], int]] = {
        "one request at a time": (seconds_apart, LONGEST),
        "static batches": (in_batches, LONGEST * SLOTS),
        "continuous, prompts whole": (seconds, LONGEST * SLOTS),
        f"continuous, chunks of {CHUNK}": (seconds, CHUNK),
    }

    def rate(run: Callable[..., float], budget: int) -> float:
        scheduler = {"max_num_seqs": SLOTS, "max_num_batched_tokens": budget}
        with setting.llm(scheduler=scheduler, model={"max_model_len": LONGEST}) as llm:
            prompts = [setting.prompt(llm, prompt) for prompt, _ in lengths]
            run(llm, prompts[:2], [4, 4])  # page in the weights
            llm.reset_prefix_cache()
            return tokens / run(llm, prompts, [output for _, output in lengths])

    rates = {name: setting.once(name, partial(rate, *given)) for name, given in runs.items()}
    static = rates["static batches"]
    longest, mean = max(out for _, out in lengths), statistics.mean(out for _, out in lengths)
    return Result(
        ("batches", "tokens/s", "beside static"),
        [(name, rate, f"{rate / static:.2f} x") for name, rate in rates.items()],
        f"Filling a batch at each step is {rates['continuous, prompts whole'] / static:.1f} times as fast as filling "
        f"it once. Scheduling alone can gain at most the longest output over the mean, here {longest / mean:.1f}; the "
        "23 of the articles compares two engines.",
        f"{len(lengths)} requests with the lengths of chats, {SLOTS} slots, on one engine. A slot whose request of 10 "
        "tokens waits for one of 500 is idle in 490 of 500 steps.",
    )


STUDY = Study(
    "Static and continuous batching",
    (
        Claim("continuous batching raises throughput by up to 23 times", (GUIDE,)),
        Claim("in a static batch a request of 10 tokens waits for one of 500", (GUIDE,)),
    ),
    measure,
)
