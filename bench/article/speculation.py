"""Speculative decoding by the number of sequences: pinned drafts beside the controller."""

from __future__ import annotations

from functools import partial

from bench.article.curves import Curves
from bench.article.study import GUIDE, OPTIMIZE, Claim, Result, Setting, Study, exactly
from quire.config import EngineConfig
from quire.llm import LLM
from quire.params import SamplingParams

SIZES = (1, 4, 8, 16, 64)
TEXT = "One day, Lily met a cat. One day, Lily met a dog. One day, Lily met a"


def rates(config: EngineConfig, count: int) -> tuple[list[float], list[list[int]]]:
    """Output tokens per second by number of sequences, and the tokens of the first batch."""
    found, tokens = [], []
    with LLM.from_config(config) as llm:
        for size in SIZES:
            params = [
                SamplingParams(temperature=1.0, seed=i, max_tokens=count, ignore_eos=True)
                for i in range(size)
            ]
            llm.generate([TEXT] * size, exactly(4), use_tqdm=False)
            before = llm.stats()
            outputs = llm.generate([TEXT] * size, params, use_tqdm=False)
            assert llm.stats().generation_tokens - before.generation_tokens == size * count
            ended = [output.metrics for output in outputs if output.metrics]
            took = max(m.last_token_ts for m in ended) - min(m.queued_ts for m in ended)
            found.append(size * count / took)
            tokens.append([token for output in outputs for token in output.outputs[0].token_ids])
    return found, tokens


def measure(setting: Setting) -> Result:
    count = setting.count(128, 16)
    draft = setting.config.speculation.speculative_config or {"method": "ngram", "num_speculative_tokens": 4}
    assert isinstance(draft, dict)
    modes = {
        "plain": None,
        "always drafting": {**draft, "adaptive": False},
        "controller": {**draft, "adaptive": True},
    }
    found, texts = {}, {}
    for name, options in modes.items():
        config = setting.with_options(speculation={"speculative_config": options})
        found[name], texts[name] = setting.once(name, partial(rates, config, count))
    assert texts["plain"] == texts["always drafting"] == texts["controller"]
    plain = found["plain"]
    rows: list[tuple[str | float, ...]] = [
        (name, *(f"{rate:,.0f} ({rate / base:.2f} x)" for rate, base in zip(values, plain, strict=True)))
        for name, values in found.items()
    ]
    pinned, steered = ([rate / base for rate, base in zip(found[k], plain, strict=True)]
                       for k in ("always drafting", "controller"))  # fmt: skip
    return Result(
        ("drafts", *(f"{size} sequences" for size in SIZES)),
        rows,
        f"Drafting always is {pinned[0]:.2f} times as fast for one sequence and {pinned[-1]:.2f} times for "
        f"{SIZES[-1]}; the controller is at {min(steered):.2f} to {max(steered):.2f}. Outputs are equal, bit for bit.",
        f"Drafts by {draft.get('method') or draft.get('model')}, temperature 1.",
        Curves("sequences", "beside plain decoding",
             {"always drafting": list(zip(map(float, SIZES), pinned, strict=True)),
              "controller": list(zip(map(float, SIZES), steered, strict=True))}, log_x=True),
    )  # fmt: skip


STUDY = Study(
    "Speculation by load",
    (
        Claim("a draft model speeds up decoding 2 to 3 times", (OPTIMIZE,)),
        Claim("speculation may slow a server down at high load", (GUIDE,)),
    ),
    measure,
)
