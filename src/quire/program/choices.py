"""Decide between the choices of a `select` by SGLang's three methods. Log-probabilities only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.steps import ChoicesMethod

Entry = tuple[float | None, int, str]
"""Log-probability (None: not scored), token id and text of a token."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The number of the chosen text, and the figures behind it."""

    index: int
    meta_info: dict[str, Any]


def kept(text: str, entries: Sequence[Entry]) -> list[Entry]:
    """Keep the entries that belong to a choice; the first given one is the last token of `text`.

    The first is that token itself, unless the choice changed how it is tokenized.
    """
    whole = len(entries) > 1 and text.endswith(entries[0][2])
    return list(entries[1:] if whole else entries)


def mean(logprobs: Sequence[float | None]) -> float:
    """Average the values that are neither None nor 0, as SGLang's endpoint does."""
    counted = [one for one in logprobs if one]
    return sum(counted) / len(counted) if counted else 0.0


def decide(
    method: ChoicesMethod,
    rows: Sequence[Sequence[Entry]],
    unconditional: Sequence[Sequence[float | None]] | None = None,
) -> Decision:
    """Choose by the kept entries of each choice; the first of equals.

    `unconditional` has the log-probabilities of the same tokens without a text before them.
    """
    logprobs = [[entry[0] for entry in row] for row in rows]
    means = [mean(row) for row in logprobs]
    meta: dict[str, Any] = {"normalized_prompt_logprobs": means, "input_token_logprobs": [*map(list, rows)]}
    if method == "token_length_normalized":
        return Decision(_first_best(means), meta)
    if method == "greedy_token_selection":
        index, matrix = _greedy([[one or 0.0 for one in row] for row in logprobs])
        return Decision(index, {**meta, "greedy_logprob_matrix": matrix})
    assert unconditional is not None
    alone = [[one or 0.0 for one in row] for row in unconditional]
    normalized = [
        sum((one or 0.0) - other for one, other in zip(row, without, strict=True)) / len(row)
        for row, without in zip(logprobs, alone, strict=True)
    ]
    meta["unconditional_token_logprobs"] = [*map(list, unconditional)]
    meta["normalized_unconditional_prompt_logprobs"] = normalized
    return Decision(_first_best(normalized), meta)


def _first_best(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=lambda i: (scores[i], -i))


def _greedy(rows: Sequence[Sequence[float]]) -> tuple[int, list[list[float]]]:
    """Token by token, keep the choices with the highest log-probability; short rows go on with their own mean."""
    longest = max(map(len, rows))
    matrix = [[*row, *[sum(row) / len(row)] * (longest - len(row))] for row in rows]
    left = list(range(len(rows)))
    for column in range(longest):
        best = max(matrix[i][column] for i in left)
        left = [i for i in left if matrix[i][column] == best]
        if len(left) == 1:
            break
    return left[0], matrix
