"""Sends requests at their times to an engine process, and notes when their tokens come."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.article.study import exactly
from quire.config import EngineConfig
from quire.llm.async_llm import AsyncLLM
from quire.params import OutputKind


@dataclass(frozen=True, slots=True)
class Timed:
    """A request: seconds from the start, tokens in and out."""

    at: float
    prompt: int
    output: int


def arrivals(rng: random.Random, rate: float, count: int) -> list[float]:
    """Draw Poisson times of arrival."""
    return [float(at) for at in np.cumsum([rng.expovariate(rate) for _ in range(count)])]


def latencies(found: Sequence[Sequence[float]], requests: Sequence[Timed]) -> list[float]:
    """Return TTFT p50 and p99 and ITL p50, in ms, of what `timed` found."""
    first = [got[0] - request.at for got, request in zip(found, requests, strict=True)]
    between = np.concatenate([np.diff(got) for got in found])
    return [*(1e3 * float(np.quantile(first, q)) for q in (0.5, 0.99)), 1e3 * float(np.median(between))]


def timed(config: EngineConfig, requests: Sequence[Timed], rng: random.Random) -> list[list[float]]:
    """When each token of each request arrived, in seconds from the start."""
    engine = AsyncLLM(config)
    try:
        return asyncio.run(_send(engine, requests, rng))
    finally:
        engine.shutdown()


async def _send(engine: AsyncLLM, requests: Sequence[Timed], rng: random.Random) -> list[list[float]]:
    # Ids below 256 are in every vocabulary.
    prompts = [[rng.randrange(256) for _ in range(request.prompt)] for request in requests]
    await _stream(engine, "warm up", [1, 2, 3], 2, 0.0)
    began = time.perf_counter()

    async def one(number: int) -> list[float]:
        request = requests[number]
        await asyncio.sleep(began + request.at - time.perf_counter())
        return await _stream(engine, str(number), prompts[number], request.output, began)

    return list(await asyncio.gather(*map(one, range(len(requests)))))


async def _stream(engine: AsyncLLM, name: str, prompt: list[int], count: int, began: float) -> list[float]:
    params = exactly(count)
    params.output_kind = OutputKind.DELTA
    times = []
    async for output in engine.generate({"prompt_token_ids": prompt}, params, name):
        now = time.perf_counter() - began
        times += [now] * len(output.outputs[0].token_ids)
    return times
