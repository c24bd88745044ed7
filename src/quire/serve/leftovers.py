"""What an agent sends that this server cannot run: kept as text where it holds text, else left out with a notice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_NOTICES = 64
MAX_DEPTH = 8
# Members that hold what a tool or a document says.
_TEXTS = (
    "title",
    "source",
    "data",
    "text",
    "content",
    "output",
    "outputs",
    "results",
    "logs",
    "stdout",
    "stderr",
)


class Dropped(list[str]):
    """Paths of what was left out, for the header that tells the sender."""

    def note(self, where: str, kind: object) -> None:
        if len(self) < MAX_NOTICES:
            self.append(f"{where}.{str(kind)[:64]}")


def text_in(value: Any, depth: int = 0) -> str:
    """Join the texts in a value by newlines, whatever its type; data that is not plain text has none."""
    if isinstance(value, str):
        return value
    if depth > MAX_DEPTH:
        return ""
    if isinstance(value, Mapping):
        if value.get("type") == "base64":
            return ""
        value = [value[name] for name in _TEXTS if name in value]
    texts = [text_in(item, depth + 1) for item in value] if isinstance(value, list) else []
    return "\n".join(text for text in texts if text)
