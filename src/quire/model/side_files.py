"""Copies a model's files beside its weights to a directory that is built from it."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from quire.model.load import BUILT, BUILT_RANKS
from quire.text.saving import save
from quire.weights.gguf import is_gguf
from quire.weights.hub import open_tokenizer

# KEPT files are needed by a tokenizer, a chat template and a reader of the directory; the weights' index is not.
KEPT = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "README.md")
DROPPED = ("*.index.json", BUILT, BUILT_RANKS)


def copy_side_files(source: Path, target: Path) -> None:
    """Copy the files beside the weights; for a GGUF file, write the files that it stands in for."""
    if is_gguf(source):
        save(open_tokenizer(source), target)
    else:
        kept, dropped = ({p for pattern in some for p in source.glob(pattern)} for some in (KEPT, DROPPED))
        for path in filter(Path.is_file, kept - dropped):
            shutil.copyfile(path, target / path.name)
    tokenizer = target / "tokenizer.json"
    if tokenizer.exists():
        tokenizer.write_bytes(_compact_tokenizer(tokenizer.read_bytes()))


def _compact_tokenizer(content: bytes) -> bytes:
    """Rewrite tokenizer.json without spaces and with merges as "a b", the form that loads fastest.

    Reading a large vocabulary takes most of an engine's start. If the parts of any merge contain a space, merges keep
    their form.
    """
    tokenizer = msgspec.json.decode(content)
    model = tokenizer.get("model")
    merges = model.get("merges") if isinstance(model, dict) else None
    if isinstance(merges, list) and all(_is_plain_pair(merge) for merge in merges):
        model["merges"] = [" ".join(merge) for merge in merges]
    return msgspec.json.encode(tokenizer)


def _is_plain_pair(merge: object) -> bool:
    return isinstance(merge, list) and len(merge) == 2 and not any(" " in part for part in merge)
