"""A decode step with the KV cache, beside computing the whole context again, and what limits it."""

from __future__ import annotations

import statistics

from bench.article.curves import Curves
from bench.article.study import GUIDE, Claim, Result, Setting, Study, decode_seconds, seconds
from quire.bench.report import share_of
from quire.engine.plan import make_backend

LENGTHS = (64, 256, 1024, 4096)
STEPS = 24


def measure(setting: Setting) -> Result:
    limits = make_backend(setting.config.device).measure_limits("fp32")
    repeats = setting.count(5)
    rows: list[tuple[str | float, ...]] = []
    curves: dict[str, list[tuple[float, float]]] = {"with the cache": [], "computed again": []}
    with setting.llm(cache={"enable_prefix_caching": False}) as llm:
        cost, spec = llm.report.cost, llm.report.kv_spec
        for length in (n for n in LENGTHS if n + STEPS < llm.max_model_len):
            step = statistics.median(
                decode_seconds(llm, [setting.prompt(llm, length)], STEPS) for _ in range(repeats)
            )
            again = statistics.median(
                seconds(llm, [setting.prompt(llm, length)], [1]) for _ in range(repeats)
            )
            read = (cost.step_bytes(1) + cost.kv_bytes(length, spec)) / step / 1e9
            operations = cost.decode_operations(length) / step / 1e9
            rows.append((f"{length:,}", step * 1e3, again * 1e3, share_of(read, limits.read_gbs),
                         share_of(operations, limits.peak_gflops, 1)))  # fmt: skip
            curves["with the cache"].append((length, step * 1e3))
            curves["computed again"].append((length, again * 1e3))
    return Result(
        (
            "context",
            "step with the cache, ms",
            "computed again, ms",
            "share of bandwidth",
            "share of arithmetic",
        ),
        rows,
        f"Behind {rows[-1][0]} tokens a step with the cache is {float(rows[-1][2]) / float(rows[-1][1]):.0f} times "
        f"as fast as computing the context again. It uses {rows[0][3]} of the memory bandwidth and {rows[0][4]} of "
        "the arithmetic: decoding is memory-bound.",
        "One sequence; limits measured in the same run.",
        Curves("context (tokens)", "ms per token", curves, log_x=True),
    )


STUDY = Study(
    "The KV cache",
    (
        Claim("decoding is memory-bound", (GUIDE,)),
        Claim("a KV cache lowers the work of attention per step from O(n^2) to O(n)", (GUIDE,)),
    ),
    measure,
)
