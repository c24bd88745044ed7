"""The parts of a study: what articles claim, where to measure, and what came out."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from bench.article.curves import Curves
from quire import LoRARequest
from quire.config import EngineConfig
from quire.engine.plan import plan_engine
from quire.files import replaced
from quire.llm import LLM
from quire.params import SamplingParams

T = TypeVar("T")
ENGINES = "vLLM, TensorRT-LLM & Inference Engines"
LESSON = "LLMs Deep Dive, lesson 16"
OPTIMIZE = "Optimize LLM Inference With vLLM and TensorRT-LLM"
GUIDE = "A guide to serving with vLLM and TensorRT-LLM"


@dataclass(frozen=True, slots=True)
class Claim:
    """A figure as articles give it. `wrong` says why it cannot be right."""

    says: str
    articles: tuple[str, ...]
    wrong: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """A table, one sentence on what it says, and a note on how it was measured."""

    columns: tuple[str, ...]
    rows: list[tuple[str | float, ...]]
    finding: str
    note: str = ""
    plot: Curves | None = None


class Measured:
    """What a study has measured so far, in a JSON file; it counts for the same `settings` alone."""

    def __init__(self, file: Path, settings: object) -> None:
        self._file, self._settings = file, json.loads(json.dumps(settings, default=str))
        found = json.loads(file.read_text()) if file.exists() else {}
        self.parts: dict[str, Any] = found["parts"] if found.get("settings") == self._settings else {}

    def once(self, name: str, measure: Callable[[], T]) -> T:
        if name not in self.parts:
            self.parts[name] = measure()
            with replaced(self._file) as path:
                path.write_text(json.dumps({"settings": self._settings, "parts": self.parts}) + "\n")
        part: T = self.parts[name]
        return part

    def forget(self) -> None:
        """Remove the file: the study is complete."""
        self._file.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a study runs. `scale` in (0, 1] shrinks its load; `data` is a file or folder that it can read."""

    config: EngineConfig
    scale: float = 1.0
    data: Path | None = None
    price_per_hour: float = 1.0
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    measured: Measured | None = None

    def once(self, name: str, measure: Callable[[], T]) -> T:
        """Measure a part of the study, unless an earlier run that was interrupted has done so.

        What is measured is kept as JSON: numbers, texts and lists of such.
        """
        return measure() if self.measured is None else self.measured.once(name, measure)

    def count(self, wanted: int, least: int = 1) -> int:
        return max(least, round(wanted * self.scale))

    def with_options(self, **changes: dict[str, Any]) -> EngineConfig:
        """The engine's options with other values: section={option: value}."""
        sections = {name: replace(getattr(self.config, name), **values) for name, values in changes.items()}
        return replace(self.config, **sections)

    def llm(self, **changes: dict[str, Any]) -> LLM:
        return LLM.from_config(self.with_options(**changes))

    def longest(self) -> int:
        """The most tokens of a sequence."""
        return plan_engine(self.config).memory.max_model_len

    def prompt(self, llm: LLM, length: int) -> dict[str, list[int]]:
        """Random tokens, so that no two prompts share a prefix."""
        return {"prompt_token_ids": [self.rng.randrange(llm.vocab_size) for _ in range(length)]}


@dataclass(frozen=True, slots=True)
class Study:
    """A comparison that articles make."""

    title: str
    claims: tuple[Claim, ...]
    measure: Callable[[Setting], Result]


def exactly(count: int) -> SamplingParams:
    """Greedy decoding of `count` tokens."""
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)


def seconds(
    llm: LLM, prompts: Sequence[Any], counts: Sequence[int], adapter: LoRARequest | None = None
) -> float:
    """Measure the time that the engine takes for all prompts at once, with these numbers of output tokens."""
    began = time.perf_counter()
    params = [exactly(count) for count in counts]
    llm.generate(list(prompts), params, use_tqdm=False, lora_request=adapter)
    return time.perf_counter() - began


def seconds_apart(llm: LLM, prompts: Sequence[Any], counts: Sequence[int]) -> float:
    """The time that the engine takes for the prompts one after the other."""
    return sum(seconds(llm, [prompt], [count]) for prompt, count in zip(prompts, counts, strict=True))


def decode_seconds(llm: LLM, prompts: Sequence[Any], count: int) -> float:
    """The time of one step in which all prompts have their first token and go on for `count`."""
    outputs = llm.generate(list(prompts), exactly(count + 1), use_tqdm=False)
    ended = time.perf_counter()
    return (ended - max(output.metrics.first_token_ts for output in outputs if output.metrics)) / count
