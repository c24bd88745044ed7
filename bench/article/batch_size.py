"""Time to first token, time between tokens and throughput by --max-num-seqs, at two rates of arrival."""

from __future__ import annotations

from functools import partial

from bench.article.curves import Curves
from bench.article.lengths import conversations
from bench.article.study import GUIDE, OPTIMIZE, Claim, Result, Setting, Study, seconds
from bench.article.traffic import Timed, arrivals, latencies, timed

SLOTS = (8, 16, 64, 256)
LONGEST = 384
LOADS = {"half of what it can do": 0.5, "all at once": 1e9}


def measure(setting: Setting) -> Result:
    lengths = conversations(setting.data, setting.count(128, 16), LONGEST)
    tokens = sum(output for _, output in lengths)
    fits = {"max_model_len": LONGEST + 1}

    def all_at_once() -> float:
        with setting.llm(model=fits) as llm:
            prompts = [setting.prompt(llm, prompt) for prompt, _ in lengths]
            return seconds(llm, prompts, [output for _, output in lengths])

    busy = setting.once("all at once", all_at_once)
    rows: list[tuple[str | float, ...]] = []
    curves: dict[str, list[tuple[float, float]]] = {}
    for load, share in LOADS.items():
        rate = share * len(lengths) / busy
        # Kept too: the requests of an interrupted run came at these times.
        times = setting.once(f"arrivals, {load}", partial(arrivals, setting.rng, rate, len(lengths)))
        requests = [Timed(at, *pair) for at, pair in zip(times, lengths, strict=True)]
        for slots in SLOTS:
            config = setting.with_options(model=fits, scheduler={"max_num_seqs": slots})
            found = setting.once(f"{load}, {slots} slots", partial(timed, config, requests, setting.rng))
            answered = tokens / max(got[-1] for got in found)
            rows.append((load, slots, *latencies(found, requests), answered))
            curves.setdefault(load, []).append((slots, answered))
    few, many = rows[len(SLOTS)], rows[-1]
    return Result(
        ("load", "max-num-seqs", "TTFT p50, ms", "p99", "ITL p50, ms", "tokens/s"),
        rows,
        f"All at once, {SLOTS[-1]} slots make {float(many[5]) / float(few[5]):.1f} times the tokens of {SLOTS[0]}, "
        f"and the median time to first token is {float(many[2]) / float(few[2]):.2f} times theirs: fewer slots lower "
        "the time between tokens, not the time to the first.",
        f"{len(lengths)} requests with the lengths of chats; arrivals are Poisson.",
        Curves("max-num-seqs", "output tokens per second", curves, log_x=True),
    )


STUDY = Study(
    "Slots: latency and throughput",
    (
        Claim("8 to 16 sequences keep the time to first token low, 64 to 256 favour throughput", (OPTIMIZE,)),
        Claim("the time to first token is 35 to 50 ms at low load and grows with it", (GUIDE,)),
    ),
    measure,
)
