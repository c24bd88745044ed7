"""The default maker: the core of an engine, and the front that makes its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.client.front import Front
from quire.config import EngineConfig
from quire.engine.start import has_tokenizer, load_tokenizer, start_core
from quire.lazy import Lazy
from quire.logits_processor import load_processors
from quire.types import ModelCard

if TYPE_CHECKING:
    from quire.text.template import render
else:
    render = Lazy("quire.text.template.render")

__all__ = ["start_core", "start_front"]


def start_front(
    config: EngineConfig, info: ModelCard, skip_tokenizer: bool = False, seed: int | None = None
) -> Front:
    """A front with the tokenizer and the chat template of the configured model."""
    front = _make_front(config, info, skip_tokenizer, seed)
    front.processors = load_processors(config.model.logits_processors)
    front.longest_text = config.model.pooler.longest_text
    front.processed_logprobs = config.model.logprobs_mode != "raw_logprobs"
    return front


def _make_front(config: EngineConfig, info: ModelCard, skip_tokenizer: bool, seed: int | None) -> Front:
    if skip_tokenizer or not has_tokenizer(config.model):
        return Front(info, None, None, seed)
    tokenizer = load_tokenizer(config.model)
    chosen = config.model.chat_template
    has_template = chosen is not None or tokenizer.chat_template is not None
    template = (lambda: render.ChatTemplate.load(tokenizer, chosen)) if has_template else None
    return Front(info, tokenizer, template, seed)
