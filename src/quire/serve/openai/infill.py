"""Prompts that ask for the text between a prefix and a suffix (Bavarian et al. 2022, arXiv:2207.14255)."""

from __future__ import annotations

from typing import NamedTuple

from quire.client.requests import Front
from quire.serve.errors import unsupported


class Tokens(NamedTuple):
    """The tokens before the prefix, before the suffix, and before the middle; models without the last put the suffix
    first."""

    prefix: str
    suffix: str
    middle: str = ""


FORMS = (
    Tokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    Tokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    Tokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    Tokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    Tokens("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4
    Tokens("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    Tokens("[PREFIX]", "[SUFFIX]"),  # Codestral
)


def infill(front: Front, prefix: str, suffix: str, add_special_tokens: bool) -> list[int]:
    """The prompt's tokens. 400 if the model has no tokens for it."""
    tokenizer = front.tokenizer
    for form in FORMS if tokenizer is not None else ():
        assert tokenizer is not None
        ids = [tokenizer.token_to_id(name) for name in form if name]
        if None in ids:
            continue
        marks = [token for token in ids if token is not None]
        before = [marks[0], *front.encode(prefix, add_special_tokens=False)]
        after = [marks[1], *front.encode(suffix, add_special_tokens=False)]
        begin = _beginning(front) if add_special_tokens else []
        return begin + (before + after + marks[2:] if form.middle else after + before)
    raise unsupported("suffix", "this model has no tokens for filling in the middle")


def _beginning(front: Front) -> list[int]:
    """The token that the tokenizer puts before a text, if it does."""
    first = front.encode("a")[:1]
    return first if front.tokenizer is not None and first == [front.tokenizer.bos_token_id] else []
