"""An engine directory beside its checkpoint: the time to build it, and what it brings."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

from bench.article.study import (
    ENGINES,
    LESSON,
    OPTIMIZE,
    Claim,
    Result,
    Setting,
    Study,
    decode_seconds,
    exactly,
)
from quire.build import build_engine
from quire.config import EngineConfig
from quire.llm import LLM
from quire.model.info import EngineLimits

BYTES_OF_70B = 141e9


def speeds(config: EngineConfig, setting: Setting) -> tuple[float, float]:
    """Seconds to the first token of a new engine, and output tokens per second of one sequence."""
    began = time.perf_counter()
    with LLM.from_config(config) as llm:
        llm.generate([{"prompt_token_ids": [1]}], exactly(1), use_tqdm=False)
        first = time.perf_counter() - began
        return first, 1 / decode_seconds(llm, [setting.prompt(llm, 16)], setting.count(64, 8))


def measure(setting: Setting) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "engine"
        began = time.perf_counter()
        build_engine(setting.config, directory, EngineLimits())
        took = time.perf_counter() - began
        size = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
        found = {
            "checkpoint": speeds(setting.config, setting),
            "engine directory": speeds(
                replace(setting.config, model=replace(setting.config.model, model=str(directory))), setting
            ),
        }
    rate = took / size
    return Result(
        ("model", "first token, s", "decode, tokens/s"),
        [(name, first, speed) for name, (first, speed) in found.items()],
        f"Building takes {took:.1f} s for {size / 1e9:.2f} GB; at that rate {rate * BYTES_OF_70B / 60:.1f} minutes "
        "for a 70B model in 16 bits. The steps are the same, so it changes the start only.",
        "TensorRT-LLM itself needs an NVIDIA GPU: its figures were not measured here.",
    )


STUDY = Study(
    "Engines built ahead of time",
    (
        Claim("building an engine of a 70B model takes 10 to 30 minutes", (OPTIMIZE,)),
        Claim(
            "TensorRT-LLM has higher throughput than vLLM, and 10 to 30% lower latency",
            (ENGINES, LESSON, OPTIMIZE),
        ),
    ),
    measure,
)
