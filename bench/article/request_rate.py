"""Requests a second that are answered, and their times, at stated rates of arrival."""

from __future__ import annotations

from functools import partial

from bench.article.lengths import conversations
from bench.article.study import GUIDE, Claim, Result, Setting, Study, seconds
from bench.article.traffic import Timed, arrivals, latencies, timed

LONGEST = 384
LOADS = (0.25, 0.5, 0.75, 1.0, 1.5)  # of the requests a second that the engine answers if all come at once


def measure(setting: Setting) -> Result:
    lengths = conversations(setting.data, setting.count(96, 12), LONGEST)
    fits = {"max_model_len": LONGEST + 1}

    def most() -> float:
        with setting.llm(model=fits) as llm:
            prompts = [setting.prompt(llm, prompt) for prompt, _ in lengths]
            seconds(llm, prompts[:1], [2])
            return len(lengths) / seconds(llm, prompts, [output for _, output in lengths])

    capacity = setting.once("capacity", most)
    found = {
        load: setting.once(f"load {load}", partial(_at, setting, lengths, load * capacity)) for load in LOADS
    }
    rows: list[tuple[str | float, ...]] = [
        (f"{load:.0%}", load * capacity, *figures) for load, figures in found.items()
    ]
    answered = max(figures[0] for figures in found.values())
    return Result(
        ("load", "requests/s offered", "answered", "TTFT p50, ms", "p99", "ITL p50, ms"),
        rows,
        f"Up to {answered:.1f} requests a second are answered; at half of what the engine can do the median time to "
        f"first token is {found[0.5][1]:.0f} ms, beyond it requests queue.",
        f"{len(lengths)} requests with the lengths of chats; arrivals are Poisson, one after another at each load. The "
        "articles' figures are those of GPUs, with models and prompts that they do not name.",
    )


def _at(setting: Setting, lengths: list[tuple[int, int]], rate: float) -> list[float]:
    """Measure requests answered a second, TTFT p50 and p99 and ITL p50 in ms, at a rate of arrival."""
    times = arrivals(setting.rng, rate, len(lengths))
    requests = [Timed(at, *pair) for at, pair in zip(times, lengths, strict=True)]
    got = timed(setting.with_options(model={"max_model_len": LONGEST + 1}), requests, setting.rng)
    return [len(requests) / max(tokens[-1] for tokens in got), *latencies(got, requests)]


STUDY = Study(
    "Requests a second at a stated load",
    (Claim("TensorRT-LLM answers 180 to 220 requests a second, vLLM 120 to 160", (GUIDE,)),),
    measure,
)
