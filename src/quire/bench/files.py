"""Reads dataset files into plain records: texts, and arrivals of a trace. Knows no seeds, no tokens and no options."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from quire.errors import ConfigError

PROMPT_NAMES = ("prompt", "input")
LENGTH_NAMES = ("output_tokens", "output_length", "out_toks", "Output Length")


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt with its answer or the answer's length in tokens, and its arrival in seconds, as far as known."""

    prompt: str
    answer: str | None = None
    output_len: int | None = None
    time: float | None = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """One line of a trace: seconds, tokens in and out, and the hash ids of the prompt's chunks, if any."""

    time: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] | None


def read_texts(path: Path, unit: float) -> Iterator[Text]:
    """Read rows of a JSON array or of JSONL. A row holds `conversations` (ShareGPT; fewer than two turns are
    skipped), or a `prompt` (`input`) with an `output`, its length, or neither, or a list of these as `requests`.

    `unit` is one unit of `timestamp` in seconds; `arrival_s` is in seconds. ConfigError names the row.
    """
    for number, row in _rows(path):
        try:
            for request in row.get("requests", [row]):
                text = _text({**row, **request}, unit)
                if text is not None:
                    yield text
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{path}:{number}: neither a conversation nor a prompt: {error}") from error


def _text(row: dict[str, Any], unit: float) -> Text | None:
    when = row["arrival_s"] if "arrival_s" in row else row.get("timestamp")
    time = None if when is None else float(when) * (1.0 if "arrival_s" in row else unit)
    if "conversations" in row:
        turns = [turn["value"] for turn in row["conversations"]]
        return (
            Text(_string("value", turns[0]), _string("value", turns[1]), time=time)
            if len(turns) > 1
            else None
        )
    name = next((n for n in PROMPT_NAMES if n in row), "prompt")
    length_name = next((n for n in LENGTH_NAMES if n in row), None)
    length = None if length_name is None else row[length_name]
    if length is not None and (type(length) is not int or length < 0):
        raise ValueError(f'"{length_name}" must be an integer >= 0, got {length!r}')
    answer = row.get("output")
    return Text(
        _string(name, row.get(name)), None if answer is None else _string("output", answer), length, time
    )


def read_talks(path: Path) -> Iterator[list[tuple[str, str]]]:
    """Read conversations in ShareGPT's JSON: (question, answer) of each whole turn. ConfigError names the row."""
    for number, row in _rows(path):
        try:
            said = [_string("value", turn["value"]) for turn in row["conversations"]]
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}:{number}: not a conversation: {error}") from error
        if len(said) > 1:
            yield list(zip(said[::2], said[1::2], strict=False))


def _string(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f'"{name}" must be a string')
    return value


def is_token_trace(path: Path) -> bool:
    """Whether the file holds lengths (Azure's CSV, Mooncake's JSONL) rather than texts."""
    return path.suffix == ".csv" or any("input_length" in row for _, row in _rows(path, 1))


def read_arrivals(path: Path, unit: float) -> Iterator[Arrival]:
    """Read Mooncake's JSONL, whose timestamps count in `unit` seconds, or Azure's CSV. ConfigError names the row."""
    return _azure(path) if path.suffix == ".csv" else _mooncake(path, unit)


def _mooncake(path: Path, unit: float) -> Iterator[Arrival]:
    for number, row in _rows(path):
        try:
            hash_ids = row.get("hash_ids")
            arrival = Arrival(
                float(row["timestamp"]) * unit,
                int(row["input_length"]),
                int(row["output_length"]),
                None if hash_ids is None else tuple(int(i) for i in hash_ids),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path}:{number}: a line needs timestamp, input_length and output_length: {error!r}"
            ) from error
        if arrival.input_len < 1 or arrival.output_len < 0 or min(arrival.hash_ids or (0,)) < 0:
            raise ConfigError(f"{path}:{number}: lengths and hash ids must not be negative")
        yield arrival


def _azure(path: Path) -> Iterator[Arrival]:
    for number, row in enumerate(csv.DictReader(_read(path).splitlines()), 2):
        try:
            moment, _, fraction = row["TIMESTAMP"].partition(".")
            seconds = (datetime.fromisoformat(moment) - datetime(2000, 1, 1)).total_seconds()
            seconds += float(f"0.{fraction}") if fraction else 0.0
            yield Arrival(seconds, int(row["ContextTokens"]), int(row["GeneratedTokens"]), None)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path}:{number}: a line needs TIMESTAMP, ContextTokens, GeneratedTokens: {error!r}"
            ) from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path {path} cannot be read: {error}") from error


def _rows(path: Path, most: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number from 1, object) for each element of a JSON array or line of JSONL; at most `most`."""
    text = _read(path)
    rows: Iterable[tuple[int, Any]]
    if text.lstrip().startswith("["):
        try:
            rows = enumerate(json.loads(text), 1)
        except ValueError as error:
            raise ConfigError(f"{path}: not JSON: {error}") from error
    else:
        rows = ((n, _object(path, n, line)) for n, line in enumerate(text.split("\n"), 1) if line.strip())
    for found, (number, row) in enumerate(rows):
        if found == most:
            return
        if not isinstance(row, dict):
            raise ConfigError(f"{path}:{number}: a row must be a JSON object")
        yield number, row


def _object(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{path}:{number}: not JSON: {error}") from error
