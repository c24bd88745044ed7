"""Writes a tokenizer as the files that make the same one."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import processors

from quire.errors import ModelError
from quire.text.tokenizer import Tokenizer


def save(tokenizer: Tokenizer, directory: Path) -> None:
    """Write the files that `Tokenizer.load` makes the same tokenizer of. Raises ModelError if no file can say it."""
    copy = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    if tokenizer.own_ends:
        ends = {tokenizer.id_to_token(i) or "": i for i in [*tokenizer.prefix, *tokenizer.suffix]}
        before, after = (
            [tokenizer.id_to_token(i) or "" for i in part] for part in (tokenizer.prefix, tokenizer.suffix)
        )
        try:
            copy.post_processor = processors.TemplateProcessing(
                single=[*before, "$A", *after], special_tokens=list(ends.items())
            )
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"the tokenizer's first and last tokens cannot be saved: {error}") from error
    (directory / "tokenizer.json").write_text(_quick_to_read(copy.to_str()), "utf-8")
    config = dict(tokenizer.special_tokens)
    if isinstance(tokenizer.chat_template, dict):
        named = [{"name": name, "template": text} for name, text in tokenizer.chat_template.items()]
        config["chat_template"] = named
    elif tokenizer.chat_template is not None:
        config["chat_template"] = tokenizer.chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    generation = {"eos_token_id": list(tokenizer.eos_token_ids)} if tokenizer.eos_token_ids else {}
    (directory / "generation_config.json").write_text(json.dumps(generation), "utf-8")


def _quick_to_read(text: str) -> str:
    """The same tokenizer.json with merges as strings if possible: the library reads those a quarter faster."""
    content = json.loads(text)
    merges = content["model"].get("merges", [])
    if content["model"]["type"] == "BPE" and not any(" " in part for merge in merges for part in merge):
        content["model"]["merges"] = [" ".join(merge) for merge in merges]
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))
