"""Time to first token, and prompt tokens computed, by the share of a prompt that is cached."""

from __future__ import annotations

import statistics

from bench.article.curves import Curves
from bench.article.study import ENGINES, GUIDE, OPTIMIZE, Claim, Result, Setting, Study, exactly
from quire.llm import LLM

PROMPT = 1024
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)


def first_token(llm: LLM, prompt: dict[str, list[int]]) -> tuple[float, int]:
    """Seconds to the first token, and cached tokens."""
    (output,) = llm.generate([prompt], exactly(1), use_tqdm=False)
    assert output.metrics is not None
    return output.metrics.first_token_latency, output.num_cached_tokens or 0


def measure(setting: Setting) -> Result:
    repeats = setting.count(9, 3)
    rows: list[tuple[str | float, ...]] = []
    curves: dict[str, list[tuple[float, float]]] = {"cached": []}
    with setting.llm() as llm:
        length = min(PROMPT, llm.max_model_len // 2)
        cold = statistics.median(first_token(llm, setting.prompt(llm, length))[0] for _ in range(repeats))
        for share in SHARES:
            shared = setting.prompt(llm, round(share * length))["prompt_token_ids"]
            if shared:
                first_token(llm, {"prompt_token_ids": shared})
            rest = length - len(shared)
            found = [
                first_token(llm, {"prompt_token_ids": shared + setting.prompt(llm, rest)["prompt_token_ids"]})
                for _ in range(repeats)
            ]
            time, cached = (statistics.median(values) for values in zip(*found, strict=True))
            rows.append((f"{share:.0%}", cached, length - cached, time * 1e3, f"{1 - time / cold:.0%}"))
            curves["cached"].append((100 * share, time * 1e3))
        total, computed = _one_system_prompt(setting, llm)
    return Result(
        ("shared part", "cached tokens", "computed", "TTFT, ms", "saved"),
        rows,
        f"With 90% of a prompt cached the first token comes {rows[4][-1]} sooner: what is saved is the shared part. Of "
        f"{total:,} requests with one system prompt, {computed:.0%} of the prompt tokens were computed.",
        f"Prompts of {length:,} tokens, alone; the last token is always computed.",
        Curves("shared part of the prompt (%)", "time to first token (ms)", curves),
    )


def _one_system_prompt(setting: Setting, llm: LLM) -> tuple[int, float]:
    """The number of requests behind one system prompt, and the share of their prompt tokens that was computed."""
    count, before = setting.count(1000, 20), llm.stats()
    system = setting.prompt(llm, min(256, llm.max_model_len // 2))["prompt_token_ids"]
    first_token(llm, {"prompt_token_ids": system})
    prompts = [
        {"prompt_token_ids": system + setting.prompt(llm, 16)["prompt_token_ids"]} for _ in range(count)
    ]
    llm.generate(prompts, exactly(1), use_tqdm=False)
    after = llm.stats()
    asked, hit = after.prefix_queries - before.prefix_queries, after.prefix_hits - before.prefix_hits
    return count, 1 - hit / asked


STUDY = Study(
    "Prefix caching",
    (
        Claim("a hit in the prefix cache reduces the time to first token hugely", (ENGINES, GUIDE)),
        Claim("prefix caching avoids up to 90% of redundant computation", (OPTIMIZE,)),
        Claim("a system prompt is computed once for thousands of requests", (GUIDE,)),
    ),
    measure,
)
