"""Quality and calibration time of quantization methods, on one model."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from bench.article.study import GUIDE, Claim, Result, Setting, Study
from quire.engine.source import find_files
from quire.errors import ConfigError
from quire.quantize.methods import READERS

METHODS: dict[str, list[str]] = {
    "rounded, 4 bits": ["--method", "rtn", "--bits", "4"],
    "GPTQ, 4 bits": ["--method", "gptq", "--bits", "4"],
    "AWQ, 4 bits": ["--method", "awq"],
    "SqueezeLLM, 4 bits": ["--method", "squeezellm", "--bits", "4"],
    "GPTQ, 3 bits": ["--method", "gptq", "--bits", "3"],
    "SqueezeLLM, 3 bits": ["--method", "squeezellm", "--bits", "3"],
    "FP8": ["--method", "fp8"],
}


def _quire(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "quire.cli", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"quire {arguments[0]} failed: {done.stderr.strip()[-500:]}")


def measure(setting: Setting) -> Result:
    if setting.data is None or not setting.data.is_file():
        raise ConfigError("quantization compares models on a text: name a UTF-8 file with --data")
    model, text = setting.config.model.model, str(setting.data)
    billions = find_files(setting.config.model).info.num_parameters / 1e9
    rows: list[tuple[str | float, ...]] = []
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, options) in enumerate(METHODS.items()):
            place = Path(folder) / str(number)
            found[name], took = setting.once(name, partial(_cost, setting, model, text, options, place))
            one = found[name]
            rows.append((name, one["perplexity"] / one["perplexity_float32"], one["kl_mean"],
                         f"{one['top1_agreement']:.1f}%", took, took / 60 / billions))  # fmt: skip
    kl = {name: one["kl_mean"] for name, one in found.items()}
    return Result(
        (
            "method",
            "perplexity beside floats",
            "KL, nats",
            "same likeliest token",
            "s",
            "minutes per billion",
        ),
        rows,
        f"At 4 bits GPTQ has {kl['GPTQ, 4 bits'] / kl['rounded, 4 bits']:.2f} and AWQ "
        f"{kl['AWQ, 4 bits'] / kl['rounded, 4 bits']:.2f} of plain rounding's divergence; at 3 bits SqueezeLLM has "
        f"{kl['SqueezeLLM, 3 bits'] / kl['GPTQ, 3 bits']:.2f} of GPTQ's. FP8 is the closest to floats.",
        "Groups of 128, the calibration text inside the package. AWQ keeps no weight in 16 bits: it scales the "
        "important channels before rounding.",
    )


def _cost(setting: Setting, model: str, text: str, options: list[str], out: Path) -> tuple[Any, float]:
    """Measure a method: the figures of its quality, and seconds."""
    samples = ["--samples", str(setting.count(128, 8))] if options[1] in READERS["samples"] else []
    began = time.perf_counter()
    _quire("quantize", "--model", model, "-o", str(out), *options, *samples)
    took = time.perf_counter() - began
    figures = out.with_suffix(".json")
    models = ["--model", str(out), "--base", model]
    reads = ["--text", text, "--max-tokens", str(setting.count(8192, 512))]
    _quire("bench", "quality", *models, *reads, "--output-json", str(figures))
    return json.loads(figures.read_text()), took


STUDY = Study(
    "Quantization methods",
    (
        Claim("GPTQ takes tens of minutes and is slightly less accurate than AWQ", (GUIDE,)),
        Claim("AWQ protects the 1% of weights that matter most and keeps 95% of quality", (GUIDE,)),
        Claim("SqueezeLLM keeps its accuracy at 3 and 4 bits", (GUIDE,)),
        Claim("FP8 keeps the most accuracy and takes minutes", (GUIDE,)),
    ),
    measure,
)
