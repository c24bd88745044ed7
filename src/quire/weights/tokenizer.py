"""Opens the tokenizer of a model. Reads no weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quire.lazy import Lazy
from quire.weights.gguf import is_gguf

if TYPE_CHECKING:
    from quire.text import tokenizer
    from quire.text.tokenizer import Tokenizer
    from quire.weights.gguf import tokenizer as gguf_tokenizer
else:
    tokenizer = Lazy("quire.text.tokenizer")
    gguf_tokenizer = Lazy("quire.weights.gguf.tokenizer")


def open_tokenizer(path: Path) -> Tokenizer:
    """Open the tokenizer of a model directory or a GGUF file. ModelError if there is none."""
    return gguf_tokenizer.open_tokenizer(path) if is_gguf(path) else tokenizer.Tokenizer.load(path)
