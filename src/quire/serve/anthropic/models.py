"""/v1/models in Anthropic's shape, for clients that send `anthropic-version`."""

from __future__ import annotations

from datetime import datetime, timezone

import msgspec

from quire.serve.openai.models import ModelList, ServedModelCard


class AnthropicModel(msgspec.Struct, tag="model"):
    id: str
    display_name: str
    created_at: str


class AnthropicModels(msgspec.Struct):
    """All models, on one page."""

    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


def model(card: ServedModelCard) -> AnthropicModel:
    created = datetime.fromtimestamp(card.created, timezone.utc)
    return AnthropicModel(card.id, card.id, created.strftime("%Y-%m-%dT%H:%M:%SZ"))


def models(cards: ModelList) -> AnthropicModels:
    data = [model(card) for card in cards.data]
    return AnthropicModels(data, data[0].id, data[-1].id)
