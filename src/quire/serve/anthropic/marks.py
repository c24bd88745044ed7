"""Finds where `cache_control` in a body of /v1/messages says that other requests will go on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from quire.client.requests import Front
from quire.serve.anthropic.protocol import CountRequest

MOST = 4  # as in Anthropic's API


def marks_of(front: Front, body: CountRequest, text: str) -> tuple[int, ...]:
    """Count the tokens of the rendered `text` up to the end of each marked block."""
    found, at = [], 0
    for part in islice(_marked(body), MOST):
        place = text.find(part, at)
        if place >= 0:
            at = place + len(part)
            found.append(len(front.encode(text[:at], add_special_tokens=False)))
    return tuple(found)


def _marked(body: CountRequest) -> Iterator[str]:
    for blocks in (body.system, *(message.get("content") for message in body.messages)):
        for block in blocks if isinstance(blocks, list) else ():
            if isinstance(block, dict) and block.get("cache_control"):
                written = block.get("text")
                if isinstance(written, str) and written.strip():
                    yield written.strip()
