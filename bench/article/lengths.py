"""Lengths of prompts and outputs: from a trace, or drawn like those of chats."""

from __future__ import annotations

import math
import random
from itertools import islice
from pathlib import Path

from quire.bench.files import read_arrivals
from quire.errors import ConfigError


def conversations(path: Path | None, count: int, longest: int) -> list[tuple[int, int]]:
    """(prompt, output) in tokens of `count` requests that fit in `longest`, at least 1 each.

    Without a trace, lengths are log-normal with the medians of public chat traces: 160 tokens in, 120 out.
    """
    if path is None:
        rng = random.Random(0)
        pairs = ((_log_normal(rng, 160, 1.1), _log_normal(rng, 120, 1.0)) for _ in range(100 * count))
    else:
        pairs = ((max(1, one.input_len), max(1, one.output_len)) for one in read_arrivals(path, 0.001))
    found = list(islice((pair for pair in pairs if sum(pair) <= longest), count))
    if not found:
        raise ConfigError(f"--data {path} has no request of at most {longest} tokens")
    return found


def _log_normal(rng: random.Random, median: int, sigma: float) -> int:
    return max(1, round(rng.lognormvariate(math.log(median), sigma)))
