"""From configuration to the front that feeds an engine: its tokenizer and chat template; or to both at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.client.front import Front
from quire.config import EngineConfig
from quire.engine.start import Started, begin_start, finish_start, load_tokenizer, start_core
from quire.lazy import Lazy
from quire.types import ModelCard

if TYPE_CHECKING:
    from quire.text import chat
else:
    chat = Lazy("quire.text.chat")

__all__ = ["start_both", "start_core", "start_front"]


def start_both(
    config: EngineConfig, skip_tokenizer: bool = False, seed: int | None = None
) -> tuple[Started, Front]:
    """The engine, and the front that feeds it: its tokenizer is read while a built engine's weights are checked."""
    started, model = begin_start(config)
    with started.report.phase("tokenizer"):
        front = start_front(config, started.info, skip_tokenizer, seed)
    return finish_start(started, model), front


def start_front(
    config: EngineConfig, info: ModelCard, skip_tokenizer: bool = False, seed: int | None = None
) -> Front:
    """The tokenizer and chat template of the configured model, ready to make requests."""
    if skip_tokenizer:
        return Front(info, None, None, seed)
    tokenizer = load_tokenizer(config.model)
    chosen = config.model.chat_template
    has_template = chosen is not None or tokenizer.chat_template is not None
    template = (lambda: chat.ChatTemplate.load(tokenizer, chosen)) if has_template else None
    return Front(info, tokenizer, template, seed)
