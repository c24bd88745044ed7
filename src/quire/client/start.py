"""The default maker: the core of an engine, and the front that makes its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.config import EngineConfig
from quire.engine.directory import has_tokenizer, load_tokenizer
from quire.lazy import Lazy
from quire.types import ModelCard

if TYPE_CHECKING:
    from quire import logits_processor
    from quire.client import requests
    from quire.client.requests import Front
    from quire.engine import start
    from quire.engine.start import Started
    from quire.text.template import render
else:
    requests, start = Lazy("quire.client.requests"), Lazy("quire.engine.start")
    render, logits_processor = Lazy("quire.text.template.render"), Lazy("quire.logits_processor")


def start_core(config: EngineConfig) -> Started:
    """Start an engine: see `quire.engine.start`, which only the engine's process imports."""
    return start.start_core(config)


def start_front(config: EngineConfig, info: ModelCard) -> Front:
    """Make a front with the tokenizer and the chat template of the configured model."""
    made = _make_front(config, info)
    if config.model.logits_processors:
        made.processors = logits_processor.load_processors(config.model.logits_processors)
    pooler = config.model.pooler
    made.longest_text, made.activates = pooler.longest_text, pooler.activates
    made.processed_logprobs = config.model.logprobs_mode != "raw_logprobs"
    return made


def _make_front(config: EngineConfig, info: ModelCard) -> Front:
    if not has_tokenizer(config.model):
        return requests.Front(info, None, None, config.seed)
    tokenizer = load_tokenizer(config.model)
    chosen = config.model.chat_template
    has_template = chosen is not None or tokenizer.chat_template is not None
    template = (lambda: render.ChatTemplate.load(tokenizer, chosen)) if has_template else None
    return requests.Front(info, tokenizer, template, config.seed)
