"""`quire bench throughput`: requests and tokens per second of many requests at once, offline."""

from __future__ import annotations

import json
import random
import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from quire.bench.lengths import fitted_lengths
from quire.bench.report import Report
from quire.cli import Command, Options
from quire.config import EngineConfig, option
from quire.engine.plan import make_backend
from quire.errors import ConfigError
from quire.flags.table import vllm_flags
from quire.flags.uses import BENCHES
from quire.llm import LLM
from quire.model.cost import Cost
from quire.params import SamplingParams
from quire.progress import Told, progress


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputOptions(Options):
    """Options of `quire bench throughput`; names are vLLM's."""

    num_prompts: int = option(32, "Number of requests.", low=1)
    input_len: int = option(128, "Tokens of each random prompt.", low=1)
    output_len: int = option(
        128, "Tokens to generate per request; lengths of a dataset are cut to this.", low=1
    )
    prefix_len: int = option(0, "Tokens of the prefix that all random prompts share.", low=0)
    dataset_path: str | None = option(
        None,
        "Prompts that are not random: a ShareGPT JSON file of conversations, or JSONL of "
        '{"prompt" or "input_ids", "output_tokens"}, whose lengths are kept.',
    )
    num_iters: int = option(3, "Runs.", low=1)
    price_per_hour: float | None = option(None, "Price of this machine: adds costs.", low=0)
    output_json: str | None = option(None, "Write the figures to this JSON file.", writes="file")


Job = tuple[list[int], int]


def run(config: EngineConfig, options: ThroughputOptions) -> None:
    llm = LLM.from_config(config)
    limits = make_backend(config.device).measure_limits(llm.report.arithmetic)
    prompt, output = fitted_lengths(
        options.prefix_len + options.input_len, options.output_len, llm.max_model_len
    )
    prefix = min(options.prefix_len, prompt - 1)
    options = replace(options, prefix_len=prefix, input_len=prompt - prefix, output_len=output)
    rng = random.Random(config.seed or 0)
    llm.generate([{"prompt_token_ids": [1]}], _params(2), use_tqdm=False)  # page in the weights
    seconds = list[float]()
    draw = _dataset_jobs if options.dataset_path else _random_jobs
    runs = [draw(llm, options, rng) for _ in range(options.num_iters)]
    with progress("throughput", sum(map(len, runs)), "requests") as told:
        for jobs in runs:
            start = time.perf_counter()
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt, _ in jobs],
                [_params(n) for _, n in jobs],
                use_tqdm=partial(Counted, told),
            )
            seconds.append(time.perf_counter() - start)
            for made, (_, wanted) in zip(outputs, jobs, strict=True):
                assert len(made.outputs[0].token_ids) == wanted
    prompt_tokens, output_tokens = sum(len(p) for p, _ in jobs), sum(n for _, n in jobs)
    median = statistics.median(seconds)
    report = Report(f"{llm.name}: {len(jobs)} requests, {llm.threads} threads")
    report.row("elapsed_s", "all requests", median, "s", spread=seconds)
    report.row("requests_per_s", "requests", len(jobs) / median, "req/s")
    report.row("total_tok_s", "tokens in and out", (prompt_tokens + output_tokens) / median, "tok/s")
    spread = [output_tokens / s for s in seconds]
    report.row("output_tok_s", "tokens out", output_tokens / median, "tok/s", spread=spread)
    operations = sum(_operations(llm.report.cost, len(prompt), count) for prompt, count in jobs)
    if options.price_per_hour is not None:
        report.costs(options.price_per_hour, output_tokens / median)
    report.row("gflop_s", "arithmetic", operations / median / 1e9, "GFLOP/s", limits.peak_gflops)
    report.show(options.output_json)


class Counted:
    """Stands for tqdm's class: passes on what has finished."""

    def __init__(self, told: Told, total: int, desc: str) -> None:
        self.update = told

    def close(self) -> None:
        """Leave nothing open."""


def _operations(cost: Cost, prompt: int, outputs: int) -> float:
    """Count one request's operations. Each output after the first is a step, on average behind half of the others."""
    return cost.prompt_operations(prompt) + (outputs - 1) * cost.decode_operations(prompt + outputs // 2)


def _params(output_len: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)


def _random_jobs(llm: LLM, options: ThroughputOptions, rng: random.Random) -> list[Job]:
    def tokens(count: int) -> list[int]:
        return [rng.randrange(llm.vocab_size) for _ in range(count)]

    prefix = tokens(options.prefix_len)
    return [(prefix + tokens(options.input_len), options.output_len) for _ in range(options.num_prompts)]


def _listed_jobs(llm: LLM, options: ThroughputOptions, path: Path) -> list[Job]:
    """Take the rows of a JSONL file that fit the model, in order, up to the number of prompts."""
    tokenizer = llm.get_tokenizer()
    jobs: list[Job] = []
    try:
        for row in map(json.loads, filter(str.strip, path.read_text().splitlines())):
            tokens = row.get("input_ids") or row.get("prompt_token_ids")
            if tokens is None and tokenizer is not None:
                tokens = tokenizer.encode(row["prompt"])
            job = list(map(int, tokens)), int(row.get("output_tokens") or options.output_len)
            if job[0] and job[1] > 0 and len(job[0]) + job[1] <= llm.max_model_len:
                jobs.append(job)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--dataset-path {path} is not JSONL of prompts: {error}") from error
    if not jobs:
        raise ConfigError(f"--dataset-path {path} has no prompt that fits the model")
    return jobs[: options.num_prompts]


def _dataset_jobs(llm: LLM, options: ThroughputOptions, rng: random.Random) -> list[Job]:
    """Read ShareGPT as vLLM does: the first turn is the prompt, the length of the second the output's."""
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    assert options.dataset_path is not None
    if options.dataset_path.endswith(".jsonl"):
        return _listed_jobs(llm, options, Path(options.dataset_path))
    try:
        rows: list[dict[str, Any]] = json.loads(Path(options.dataset_path).read_text())
        talks = [[turn["value"] for turn in row["conversations"]] for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--dataset-path {options.dataset_path} is not a ShareGPT JSON file: {error}"
        ) from error
    rng.shuffle(talks)
    jobs: list[Job] = []
    for talk in talks:
        if len(talk) < 2 or len(jobs) == options.num_prompts:
            continue
        prompt, answer = tokenizer.encode(talk[0]), tokenizer.encode(talk[1], add_special_tokens=False)
        output_len = min(len(answer), options.output_len)
        if prompt and output_len and len(prompt) + output_len <= llm.max_model_len:
            jobs.append((prompt, output_len))
    if not jobs:
        raise ConfigError(f"--dataset-path {options.dataset_path} has no conversation that fits the model")
    return jobs


COMMAND = Command(
    run, ThroughputOptions, foreign=lambda: vllm_flags("bench throughput"), arguments=("model",), uses=BENCHES
)
