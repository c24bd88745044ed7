"""The tokens that a draft model and its target both have, where their vocabularies differ."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.devices.protocol import IntArray
from quire.errors import ModelError
from quire.text.tokenizer import Tokenizer

LEAST_SHARE = 0.5
"""A draft model must share LEAST_SHARE of its vocabulary with the target: with less it could hardly draft."""
UNKNOWN = -1
NOTHING = ("", b"")


@dataclass(frozen=True, slots=True)
class TokenMap:
    """Ids across vocabularies: `draft_ids` [V of the target], 0 for tokens that the draft model lacks, and `target_ids`
    [V of the draft model], UNKNOWN for tokens that the target lacks.
    """

    draft_ids: IntArray
    target_ids: IntArray


def map_tokens(draft: Tokenizer, draft_size: int, target: Tokenizer, target_size: int) -> TokenMap | None:
    """Map the tokens; None if all ids that both have stand for the same tokens.

    ModelError: they have too few tokens in common.
    """
    theirs = [_key(target, token) for token in range(target_size)]
    own = [_key(draft, token) for token in range(draft_size)]
    if all(a == b for a, b in zip(own, theirs, strict=False)):
        return None
    known = {key: token for token, key in reversed(list(enumerate(own))) if key != NOTHING}
    places = {key: token for token, key in reversed(list(enumerate(theirs))) if key != NOTHING}
    target_ids = np.array([places.get(key, UNKNOWN) for key in own], np.int32)
    share = float((target_ids != UNKNOWN).mean())
    if share < LEAST_SHARE:
        raise ModelError(
            f"the draft model shares {share:.0%} of its tokens with the target: choose one with a tokenizer like it"
        )
    return TokenMap(np.array([known.get(key, 0) for key in theirs], np.int32), target_ids)


def _key(tokenizer: Tokenizer, token: int) -> tuple[str, bytes]:
    """Return a token's bytes, or the name of a special token. Empty for an id without a token."""
    if tokenizer.is_special(token):
        return "special", (tokenizer.id_to_token(token) or "").encode()
    piece = tokenizer.token_bytes(token)
    return ("text", piece) if piece else NOTHING
