"""The prompts of a call, from the forms that OpenAI's `prompt` and `input` fields allow."""

from __future__ import annotations

from typing import Any

from quire.serve.errors import invalid

MAX_PROMPTS = 4096


def split_prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a field that holds a text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt is empty", "prompt", "invalid_value")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise invalid(
            "prompt must be all texts, all token ids or all lists of token ids", "prompt", "invalid_type"
        )
    if kinds == {int}:
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise invalid(f"one call takes at most {MAX_PROMPTS} prompts", "prompt", "invalid_value")
    return list(prompt)
