"""Decoding speed of quantized weights by batch size: float activations, integer activations, tables."""

from __future__ import annotations

from functools import partial

from bench.article.curves import Curves
from bench.article.study import (
    GUIDE,
    LESSON,
    OPTIMIZE,
    Claim,
    Result,
    Setting,
    Study,
    decode_seconds,
)

LAYOUTS: dict[str, dict[str, str]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8, float activations (W8A16)": {"quantization": "int8wo"},
    "int8, int8 activations (W8A8)": {"quantization": "int8"},
    "int4, float activations (W4A16)": {"quantization": "int4wo"},
    "int4, int8 activations (W4A8)": {"quantization": "int4"},
    "fp8": {"quantization": "fp8"},
    "nvfp4": {"quantization": "nvfp4"},
}
SIZES = (1, 4, 8, 16, 64)


def measure(setting: Setting) -> Result:
    steps = setting.count(48, 4)

    def decode(options: dict[str, str]) -> list[float]:
        """Measure tokens a second by batch size."""
        with setting.llm(model=options) as llm:
            batches = [[setting.prompt(llm, 16) for _ in range(size)] for size in SIZES]
            return [len(prompts) / decode_seconds(llm, prompts, steps) for prompts in batches]

    rates = {name: setting.once(name, partial(decode, options)) for name, options in LAYOUTS.items()}
    plain = rates["bfloat16"]
    rows: list[tuple[str | float, ...]] = [
        (name, *(f"{rate:,.0f} ({rate / base:.2f} x)" for rate, base in zip(found, plain, strict=True)))
        for name, found in rates.items()
    ]
    crossed = _crossing(rates["int4, float activations (W4A16)"], rates["int8, int8 activations (W8A8)"])
    fp8 = [rate / base for rate, base in zip(rates["fp8"], plain, strict=True)]
    return Result(
        ("weights", *(f"batch {size}" for size in SIZES)),
        rows,
        f"Integer activations overtake weight-only int4 {crossed}. FP8, decoded on the way, is {fp8[0]:.2f} times as "
        f"fast as bfloat16 at batch size 1 and {fp8[2]:.2f} at 8.",
        "Output tokens per second, beside bfloat16.",
        Curves(
            "batch size",
            "tokens per second",
            {name: list(zip(map(float, SIZES), found, strict=True)) for name, found in rates.items()},
            log_x=True,
        ),
    )


def _crossing(weight_only: list[float], integers: list[float]) -> str:
    for size, ours, theirs in zip(SIZES, weight_only, integers, strict=True):
        if theirs > ours:
            return f"at a batch size of {size}"
    return f"at no batch size up to {SIZES[-1]}"


STUDY = Study(
    "Quantized weights by batch size",
    (
        Claim("FP8 doubles throughput at nearly the same quality", (LESSON,)),
        Claim("FP8 is 1.51 times as fast at batch size 1 and 1.40 times at 8", (GUIDE,)),
        Claim("AWQ improves throughput 1.5 to 2 times", (OPTIMIZE,)),
        Claim("FP8 is nearly as fast as INT8", (OPTIMIZE,)),
        Claim(
            "weight-only quantization suits batches of 4 or less, quantized activations 16 or more", (GUIDE,)
        ),
    ),
    measure,
)
