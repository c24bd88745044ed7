"""Gaps between the tokens of running streams while a long prompt is computed, by the size of its chunks."""

from __future__ import annotations

from functools import partial

import numpy as np

from bench.article.curves import Curves
from bench.article.study import GUIDE, OPTIMIZE, Claim, Result, Setting, Study
from bench.article.traffic import Timed, timed

USERS = (1, 4, 16)
LONG = 4096  # tokens
WHOLE = "whole prompts"


def measure(setting: Setting) -> Result:
    outputs = setting.count(96, 24)
    long = min(LONG, setting.longest() - 2)
    modes: dict[str, dict[str, float]] = {
        WHOLE: {"max_num_batched_tokens": long + 64, "target_step_time": 0},
        "chunks of 512": {"max_num_batched_tokens": 512, "target_step_time": 0},
        "chunks of 128": {"max_num_batched_tokens": 128, "target_step_time": 0},
        "steps of 100 ms": {"target_step_time": 100},
    }
    rows: list[tuple[str | float, ...]] = []
    curves: dict[str, list[tuple[float, float]]] = {}
    worst: dict[str, float] = {}
    for mode, scheduler in modes.items():
        for users in USERS:
            requests = [*(Timed(0.0, 16, outputs) for _ in range(users)), Timed(0.1, long, 1)]
            found = setting.once(
                f"{mode}, {users} users",
                partial(timed, setting.with_options(scheduler=scheduler), requests, setting.rng),
            )
            gaps = np.concatenate([np.diff(times) for times in found[:-1]])
            p99, first = float(np.quantile(gaps, 0.99)), found[-1][0] - 0.1
            rows.append(
                (mode, users, float(np.median(gaps)) * 1e3, p99 * 1e3, float(gaps.max()) * 1e3, first * 1e3)
            )
            curves.setdefault(mode, []).append((users, float(gaps.max()) * 1e3))
            worst[mode] = max(worst.get(mode, 0.0), float(gaps.max()))
    return Result(
        ("prompts", "users", "gap p50, ms", "p99", "longest", "long prompt's TTFT, ms"),
        rows,
        f"A prompt of {long:,} tokens, computed whole, stops the others for {worst[WHOLE] * 1e3:.0f} ms, in steps of "
        f"100 ms for {worst['steps of 100 ms'] * 1e3:.0f} ms.",
        "A long prompt arrives while the users' streams run.",
        Curves("users", "longest gap (ms)", curves),
    )


STUDY = Study(
    "Chunked prefill",
    (
        Claim("chunked prefill keeps a long prompt from blocking others", (OPTIMIZE,)),
        Claim("the time to first token stays at 50 to 80 ms as users grow", (GUIDE,)),
    ),
    measure,
)
