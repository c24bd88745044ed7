"""Tokenizers as transformers' objects."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase


def get_tokenizer(
    tokenizer_name: str | Path,
    *args: Any,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
    **kwargs: Any,
) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer; `tokenizer_mode` slow takes the one in Python."""
    if tokenizer_mode == "slow":
        kwargs["use_fast"] = False
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        tokenizer_name,
        *args,
        trust_remote_code=trust_remote_code,
        revision=revision,
        cache_dir=download_dir,
        **kwargs,
    )
    return found


__all__ = ["get_tokenizer"]
