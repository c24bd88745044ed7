"""Fits the lengths of synthetic requests to a model, and says so."""

from __future__ import annotations

import sys

LEAST_OUTPUT = 2  # tokens: one step after the first


def fitted_lengths(prompt: int, output: int, longest: int) -> tuple[int, int]:
    """Fit prompt and output tokens into `longest` together. The output keeps up to a quarter of it."""
    if prompt + output <= longest:
        return prompt, output
    output = min(output, max(LEAST_OUTPUT, longest // 4))
    prompt = min(prompt, longest - output)
    print(
        f"note: the model takes {longest} tokens: prompts have {prompt} tokens and outputs {output}",
        file=sys.stderr,
    )
    return prompt, output
