"""Tokens of drafts that a device keeps: a pass takes those of the pass before, and the host reads all at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from quire.devices.protocol import IntArray
from quire.devices.sampling import Logits


class KeptDraws(Protocol):
    """Draws tokens without telling the host."""

    def draws(self, slots: list[int]) -> bool:
        """Tell whether it draws for these slots: no token changes the logits of later ones."""

    def draw(self, logits: Logits, slots: list[int], positions: list[int] | None) -> Any:
        """Draw a token for each row as the sampler does at these positions; None: take the drafter's likeliest ones.

        The drafter's id of each becomes the last token of its slot, which ModelInput.unseen_U2 takes.
        """

    def read(self, drawn: Sequence[Any]) -> list[int]:
        """Wait for what `draw` returned: the target's ids, and NOT_DRAWN where there is no token."""


@runtime_checkable
class KeepsDraws(Protocol):
    """A sampler whose device can keep draws."""

    def keep_draws(self, width: int, target_ids: IntArray | None, draft_ids: IntArray | None) -> KeptDraws:
        """Make draws for a drafter of `width` tokens. The arrays map its ids to the target's, and back."""
