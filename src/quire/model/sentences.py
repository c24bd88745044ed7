"""Reads the folder of a sentence-transformers model beside its modules: the longest text, and default prompts."""

from __future__ import annotations

import logging
from pathlib import Path

from quire.errors import ModelError
from quire.text.side_files import optional, sentence_config

log = logging.getLogger(__name__)


def max_length(directory: Path) -> int | None:
    """Read the longest text in tokens, by the model's own file or its tokenizer's; warn of a default prompt."""
    prompt = default_prompt(directory)
    if prompt:
        log.warning("%s: the default prompt %r is not put before texts: send it with them", directory, prompt)
    length = sentence_config(directory).get("max_seq_length")
    if length is None and (directory / "modules.json").is_file():
        length = optional(directory / "tokenizer_config.json").get("model_max_length")
        length = int(length) if isinstance(length, (int, float)) and 0 < length < 1 << 31 else None
    if length is not None and (type(length) is not int or length < 1):
        raise ModelError(f"{directory}: max_seq_length must be an integer above 0, got {length!r}")
    return length


def default_prompt(directory: Path) -> str | None:
    """Find the text that sentence-transformers would put before each text, which Quire does not."""
    config = optional(directory / "config_sentence_transformers.json")
    name, prompts = config.get("default_prompt_name"), config.get("prompts")
    found = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    return found if isinstance(found, str) else None
