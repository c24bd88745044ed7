"""Log-probabilities of one sample, as one dictionary per token or as flat lists."""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence
from dataclasses import dataclass, field
from typing import Any, overload


@dataclass(slots=True)
class Logprob:
    """Log-probability of a token, its rank (1 is the most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


def likeliest(entries: dict[int, Logprob], count: int) -> list[int]:
    """List the tokens of rank `count` or better, best first."""
    ranked = sorted((entry.rank, token) for token, entry in entries.items() if entry.rank is not None)
    return [token for rank, token in ranked if rank <= count]


@dataclass(slots=True)
class FlatLogprobs(MutableSequence[dict[int, Logprob]]):
    """The entries of all places one after another; place i has entries start_indices[i] to end_indices[i] - 1.

    It makes a dictionary when a place is read, so that long outputs hold no object per token.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append(self, value: dict[int, Logprob]) -> None:
        self.start_indices.append(len(self.token_ids))
        for token, entry in value.items():
            self.token_ids.append(token)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
            self.decoded_tokens.append(entry.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...
    def __getitem__(self, index: int | slice) -> dict[int, Logprob] | FlatLogprobs:
        if isinstance(index, slice):
            part = FlatLogprobs()
            part.extend(self[i] for i in range(len(self))[index])
            return part
        return {
            self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i])
            for i in range(self.start_indices[index], self.end_indices[index])
        }

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("flat log-probabilities only grow")

    def __delitem__(self, index: Any) -> None:
        raise TypeError("flat log-probabilities only grow")

    def insert(self, index: int, value: dict[int, Logprob]) -> None:
        raise TypeError("flat log-probabilities only grow")

    def extend(self, values: Iterable[dict[int, Logprob]]) -> None:
        for value in values:
            self.append(value)
