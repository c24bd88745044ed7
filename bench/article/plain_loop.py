"""A plain loop of transformers beside Quire, and what batches, quantized weights and a quantized cache add."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from bench.article.lengths import conversations
from bench.article.study import ENGINES, OPTIMIZE, Claim, Result, Setting, Study, seconds, seconds_apart
from quire.bench.report import cost_per_million, share_of
from quire.engine.directory import model_directory
from quire.engine.plan import make_backend
from quire.lazy import need

LONGEST = 320
STATIC = 8  # sequences of a static batch

Jobs = list[tuple[list[int], int]]


class Transformers:
    """The model in transformers' own `generate`, greedy, in the checkpoint's type."""

    def __init__(self, setting: Setting) -> None:
        need("plain-loop", "torch", "transformers")
        self._torch: Any = importlib.import_module("torch")
        library: Any = importlib.import_module("transformers")
        threads = make_backend(setting.config.device).threads
        self._torch.set_num_threads(threads)
        path = str(model_directory(setting.config.model))
        self._model = library.AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()

    def generate(self, jobs: Jobs) -> None:
        """One padded batch, until the longest output ends."""
        torch, width = self._torch, max(len(prompt) for prompt, _ in jobs)
        ids = torch.zeros((len(jobs), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(jobs):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        count = max(output for _, output in jobs)
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )

    def seconds(self, jobs: Jobs, size: int) -> float:
        began = time.perf_counter()
        for start in range(0, len(jobs), size):
            self.generate(jobs[start : start + size])
        return time.perf_counter() - began


def measure(setting: Setting) -> Result:
    lengths = conversations(setting.data, setting.count(32, 4), LONGEST)
    jobs: Jobs = [([setting.rng.randrange(256) for _ in range(prompt)], output) for prompt, output in lengths]
    tokens = sum(output for _, output in jobs)
    few = jobs[: max(2, len(jobs) // 4)]  # the plain loop is slow
    few_tokens = sum(output for _, output in few)
    plain: list[Transformers] = []

    def slow(jobs: Jobs, size: int, tokens: int) -> float:
        """Measure the plain loop, in tokens a second; its model is loaded once."""
        if not plain:
            plain.append(Transformers(setting))
            plain[0].seconds([(jobs[0][0], 2)], 1)
        return tokens / plain[0].seconds(jobs, size)

    rates = {
        name: setting.once(name, partial(slow, part, size, count))
        for name, part, size, count in (
            ("transformers, one by one", few, 1, few_tokens),
            (f"transformers, batches of {STATIC}", jobs, STATIC, tokens),
        )
    }
    plain.clear()
    runs: dict[str, tuple[Callable[..., float], dict[str, dict[str, Any]]]] = {
        "Quire, one by one": (seconds_apart, {}),
        "Quire, one batch": (seconds, {}),
        "and int4 weights": (seconds, {"model": {"quantization": "int4"}}),
        "and an int8 cache": (
            seconds,
            {"model": {"quantization": "int4"}, "cache": {"kv_cache_dtype": "int8"}},
        ),
    }
    limits = make_backend(setting.config.device).measure_limits("bf16")
    shares: dict[str, float] = {}

    def engine(run: Callable[..., float], options: dict[str, dict[str, Any]]) -> list[float]:
        """Measure tokens a second, and count the operations of a token."""
        with setting.llm(**options) as llm:
            prompts = [{"prompt_token_ids": prompt} for prompt, _ in jobs]
            run(llm, prompts[:1], [2])
            llm.reset_prefix_cache()
            rate = tokens / run(llm, prompts, [output for _, output in jobs])
            operations = [llm.report.cost.prompt_operations(len(prompt) + output) for prompt, output in jobs]
        return [rate, sum(operations) / tokens]

    for name, given in runs.items():
        rates[name], each = setting.once(name, partial(engine, *given))
        shares[name] = each * rates[name] / 1e9 / limits.peak_gflops
    for name in list(rates)[:2]:
        shares[name] = shares["Quire, one by one"] * rates[name] / rates["Quire, one by one"]
    loop, best = rates["transformers, one by one"], rates["and an int8 cache"]
    price = setting.price_per_hour
    return Result(
        ("engine", "tokens/s", "beside the loop", "share of arithmetic", "per million tokens"),
        [
            (
                name,
                rate,
                f"{rate / loop:.1f} x",
                share_of(shares[name], 1.0, 1),
                f"{cost_per_million(price, rate):.2f}",
            )
            for name, rate in rates.items()
        ],
        f"Quire makes {rates['Quire, one batch'] / loop:.1f} times the tokens of the plain loop, and "
        f"{best / loop:.1f} times with int4 weights and an int8 cache: {1 - loop / best:.1%} less cost per token. "
        f"The loop uses {share_of(shares['transformers, one by one'], 1.0, 1)} of the machine's arithmetic.",
        f"{len(jobs)} requests with the lengths of chats; costs at {price:g} per hour. A bill of $25,000 that falls to "
        "$8,000 is a factor of 3.1.",
    )


STUDY = Study(
    "A plain loop beside an engine",
    (
        Claim("plain PyTorch uses 5 to 10% of the machine", (ENGINES,)),
        Claim("engines are 2 to 24 times as fast as plain Hugging Face code", (OPTIMIZE,)),
        Claim("TensorRT-LLM is up to 8 times as fast as PyTorch, on an H100", (OPTIMIZE,)),
        Claim(
            "batching, quantization and KV optimization lower the cost per token by 50 to 80%", (OPTIMIZE,)
        ),
        Claim("a bill for Llama 3 70B falls from $25,000 to $8,000 a month", (OPTIMIZE,)),
    ),
    measure,
)
