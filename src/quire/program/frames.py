"""Find how a chat template frames messages: the texts around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Frames:
    """Texts before and after a message of each role, as a chat template writes them.

    `default_system` is the message that it adds to a conversation without one. `stop` ends an assistant's message.
    `bos` begins a conversation, if the tokenizer does not add it by itself.
    """

    around: Mapping[str, tuple[str, str]]
    default_system: str | None = None
    stop: tuple[str, ...] = ()
    bos: str = ""

    def begin(self, role: str, first: bool) -> str:
        """Return the text before a message of `role`, the default system message included if it is the `first`."""
        text = self.around[role][0]
        if first and role != "system" and self.default_system is not None:
            before, after = self.around["system"]
            text = before + self.default_system + after + text
        return self.bos + text if first else text


PLAIN = Frames({"system": ("SYSTEM:", "\n"), "user": ("USER:", "\n"), "assistant": ("ASSISTANT:", "\n")})
