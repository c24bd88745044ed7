"""Finds where `cache_control` in a conversation says that other requests will go on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from quire.client.requests import Front

MOST = 4  # as in Anthropic's API


def marks_of(
    front: Front, messages: Iterable[Mapping[str, Any]], text: str, special: bool = False
) -> tuple[int, ...]:
    """Count the tokens of the rendered `text` up to the end of each marked block, perhaps with `special` tokens."""
    found, at = [], 0
    for part in islice(_marked(messages), MOST):
        place = text.find(part, at)
        if place >= 0:
            at = place + len(part)
            found.append(len(front.encode(text[:at], add_special_tokens=special)))
    return tuple(found)


def _marked(messages: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for message in messages:
        blocks = message.get("content")
        if isinstance(blocks, str):
            blocks = [{"text": blocks, "cache_control": message.get("cache_control")}]
        for block in blocks if isinstance(blocks, list) else ():
            if isinstance(block, dict) and block.get("cache_control"):
                written = block.get("text")
                if isinstance(written, str) and written.strip():
                    yield written.strip()
