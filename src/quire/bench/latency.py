"""`quire bench latency`: times one batch, prefill and decode apart, beside the limits of the machine."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, replace

from quire.bench.lengths import fitted_lengths
from quire.bench.report import Report
from quire.cli import Command, Options
from quire.config import EngineConfig, option
from quire.devices.protocol import MachineLimits
from quire.engine.plan import make_backend
from quire.flags.table import vllm_flags
from quire.flags.uses import BENCHES
from quire.llm import LLM
from quire.params import SamplingParams
from quire.progress import progress


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyOptions(Options):
    """Options of `quire bench latency`; names are vLLM's."""

    input_len: int = option(32, "Tokens of each prompt.", low=1)
    output_len: int = option(128, "Tokens to generate.", low=2)
    batch_size: int = option(1, "Sequences in the batch.", low=1)
    num_iters_warmup: int = option(1, "Warm-up runs.", low=0)
    num_iters: int = option(5, "Measured runs.", low=1)
    price_per_hour: float | None = option(None, "Price of this machine: adds costs.", low=0)
    output_json: str | None = option(None, "Write the figures to this JSON file.", writes="file")


def run(config: EngineConfig, options: LatencyOptions) -> None:
    llm = LLM.from_config(config)
    limits = make_backend(config.device).measure_limits(llm.report.arithmetic)
    options = _fitted(options, llm.max_model_len)
    rng = random.Random(config.seed or 0)

    def once() -> tuple[float, float]:
        """Measure the seconds until every sequence has its first token, and from then to the end."""
        prompts = [_prompt(rng, options.input_len, llm) for _ in range(options.batch_size)]
        params = SamplingParams(
            temperature=0, max_tokens=options.output_len, ignore_eos=True, detokenize=False
        )
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        first = max(o.metrics.first_token_time or 0.0 for o in outputs if o.metrics)
        return first - start, time.perf_counter() - first

    runs = []
    with progress("latency", options.num_iters_warmup + options.num_iters, "runs") as told:
        for _ in range(options.num_iters_warmup + options.num_iters):
            runs.append(once())
            told(1)
    _report(llm, options, runs[options.num_iters_warmup :], limits).show(options.output_json)


def _fitted(options: LatencyOptions, longest: int) -> LatencyOptions:
    """Fit the options' lengths to the model."""
    prompt, output = fitted_lengths(options.input_len, options.output_len, longest)
    return replace(options, input_len=prompt, output_len=output)


def _prompt(rng: random.Random, length: int, llm: LLM) -> dict[str, list[int]]:
    """Make a prompt of random tokens, so that no two prompts share a prefix."""
    return {"prompt_token_ids": [rng.randrange(llm.vocab_size) for _ in range(length)]}


def _report(
    llm: LLM, options: LatencyOptions, runs: list[tuple[float, float]], limits: MachineLimits
) -> Report:
    prefill, total = [p for p, _ in runs], [p + d for p, d in runs]
    first = statistics.median(prefill)
    step = statistics.median(d for _, d in runs) / (options.output_len - 1)
    size = options.batch_size
    report = Report(
        f"{llm.name}: {size} x ({options.input_len} + {options.output_len}), {llm.threads} threads"
    )
    report.row("latency_s", "whole batch", statistics.median(total), "s", spread=total)
    report.row("prefill_s", "prefill and first token", first, "s", spread=prefill)
    tokens = size * options.input_len
    report.row("prefill_tok_s", "prefill", tokens / first, "tok/s")
    cost = llm.report.cost
    flops = size * cost.prompt_operations(options.input_len) / first / 1e9
    report.row("prefill_gflop_s", "prefill arithmetic", flops, "GFLOP/s", limits.peak_gflops)
    report.row("step_ms", "decode step", step * 1e3, "ms")
    report.row("decode_tok_s", "decode", size / step, "tok/s")
    if options.price_per_hour is not None:
        report.costs(options.price_per_hour, size / step)
    context = options.input_len + options.output_len // 2
    read = cost.step_bytes(size) + size * cost.kv_bytes(context, llm.report.kv_spec)
    report.row("decode_gb_s", "weights and cache read", read / step / 1e9, "GB/s", limits.read_gbs)
    return report


COMMAND = Command(
    run, LatencyOptions, foreign=lambda: vllm_flags("bench latency"), arguments=("model",), uses=BENCHES
)
