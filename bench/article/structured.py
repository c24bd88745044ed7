"""Compiling JSON schemas and masking tokens: Quire beside other libraries, on one vocabulary."""

from __future__ import annotations

import gzip
import importlib
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bench.article.study import ENGINES, Claim, Result, Setting, Study
from quire.engine.directory import load_tokenizer
from quire.errors import ConfigError, RequestError
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.vocabulary import vocabulary_of
from quire.params import StructuredOutputsParams
from quire.text.tokenizer import Tokenizer

SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0},
            "friends": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        },
        "required": ["name", "age", "friends"],
        "additionalProperties": False,
    },
    {"type": "object", "properties": {"kind": {"enum": ["cat", "dog", "bird"]}}, "required": ["kind"]},
    {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 8},
]


class Matching(Protocol):
    """A schema's automaton at some point of a text."""

    def mask(self) -> None:
        """Compute which tokens may follow."""

    def take(self, token: int) -> bool:
        """Go on by one token; False: the text has ended."""


class _Quire:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._compiler = GrammarCompiler(lambda: vocabulary_of(tokenizer, tokenizer.vocab_size, ()))
        self._words = (tokenizer.vocab_size + 31) // 32
        self._compiler.prepare()

    def __call__(self, schema: Any) -> Matching:
        text = self._compiler.check(StructuredOutputsParams(json=schema))
        matcher = self._compiler.compile(text).matcher()
        return _QuireMatching(matcher, np.zeros(self._words, np.uint32))


@dataclass(slots=True)
class _QuireMatching:
    matcher: Any
    words: Any

    def mask(self) -> None:
        self.matcher.fill(self.words)

    def take(self, token: int) -> bool:
        self.matcher.advance(token)
        return not self.matcher.ended


class _Outlines:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._core: Any = importlib.import_module("outlines_core")
        schemas: Any = importlib.import_module("outlines_core.json_schema")
        self._pattern = schemas.build_regex_from_schema
        ids: dict[bytes, list[int]] = {}
        end = tokenizer.eos_token_ids[0]
        for token in range(tokenizer.vocab_size):
            if token != end and (piece := tokenizer.token_bytes(token)):
                ids.setdefault(piece, []).append(token)
        self._vocabulary = self._core.Vocabulary(end, ids)

    def __call__(self, schema: Any) -> Matching:
        index = self._core.Index(self._pattern(json.dumps(schema)), self._vocabulary)
        return _OutlinesMatching(self._core.Guide(index))


@dataclass(slots=True)
class _OutlinesMatching:
    guide: Any

    def mask(self) -> None:
        self.guide.get_tokens()

    def take(self, token: int) -> bool:
        self.guide.advance(token)
        return not self.guide.is_finished()


class _XGrammar:
    def __init__(self, tokenizer: Tokenizer) -> None:
        xgrammar: Any = importlib.import_module("xgrammar")
        pieces = [tokenizer.token_bytes(token) or b"" for token in range(tokenizer.vocab_size)]
        ends = list(tokenizer.eos_token_ids)
        info = xgrammar.TokenizerInfo(pieces, xgrammar.VocabType.RAW, stop_token_ids=ends)
        self._compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
        self._matcher = xgrammar.GrammarMatcher
        self._mask = xgrammar.allocate_token_bitmask(1, tokenizer.vocab_size)

    def __call__(self, schema: Any) -> Matching:
        compiled = self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=True)
        return _XMatching(self._matcher(compiled), self._mask)


@dataclass(slots=True)
class _XMatching:
    matcher: Any
    words: Any

    def mask(self) -> None:
        self.matcher.fill_next_token_bitmask(self.words)

    def take(self, token: int) -> bool:
        return bool(self.matcher.accept_token(token)) and not self.matcher.is_terminated()


LIBRARIES: dict[str, Callable[[Tokenizer], Callable[[Any], Matching]]] = {
    "Quire": _Quire,
    "outlines-core": _Outlines,
    "xgrammar": _XGrammar,
}


def measure(setting: Setting) -> Result:
    tokenizer = load_tokenizer(setting.config.model)
    schemas = list(_schemas(setting.data, setting.count(100, 3)))
    texts = [(schema, tokenizer.encode(text, add_special_tokens=False)) for schema, text in schemas]
    rows: list[tuple[str | float, ...]] = []
    masks: dict[str, float] = {}
    for name, library in LIBRARIES.items():
        try:
            compile_schema = library(tokenizer)
        except ImportError:
            rows.append((name, "not installed", "", "", "", ""))
            continue
        compiled, stepped = _times(compile_schema, texts)
        masks[name] = float(np.median(stepped))
        counts = f"{len(compiled)} of {len(texts)}"
        rows.append((name, counts, *_quantiles(compiled, 1e3), *_quantiles(stepped, 1e6)))
    others = [f"{name} {time / masks['Quire']:.2g} times" for name, time in masks.items() if name != "Quire"]
    beside = f"; {' and '.join(others)} as long" if others else ""
    return Result(
        ("library", "schemas compiled", "compile p50, ms", "p99", "mask p50, us", "p99"),
        rows,
        f"Quire's mask takes {1e6 * masks['Quire']:.0f} us per token{beside}.",
        f"A vocabulary of {tokenizer.vocab_size:,}; each library reads the same JSON token by token.",
    )


def _quantiles(seconds: list[float], scale: float) -> tuple[float, float]:
    """Median and 99th percentile."""
    return scale * float(np.median(seconds)), scale * float(np.quantile(seconds, 0.99))


def _times(
    compile_schema: Callable[[Any], Matching], texts: list[tuple[Any, list[int]]]
) -> tuple[list[float], list[float]]:
    """Seconds to compile each schema that the library takes, and to make each mask along its text."""
    compiled, masks = [], []
    for schema, tokens in texts:
        began = time.perf_counter()
        try:
            matching = compile_schema(schema)
        except (RuntimeError, ValueError, TypeError, RequestError):
            continue  # counted: the table says how many were taken
        compiled.append(time.perf_counter() - began)
        for token in tokens:
            began = time.perf_counter()
            matching.mask()
            masks.append(time.perf_counter() - began)
            try:
                if not matching.take(token):
                    break
            except (RuntimeError, ValueError, RequestError):
                break  # another spelling of the same value
    return compiled, masks


def _schemas(folder: Path | None, count: int) -> Iterator[tuple[Any, str]]:
    """Schemas with a valid JSON text each: of JSONSchemaBench's files, or three of our own."""
    if folder is None:
        values = ('{"name": "Lily", "age": 4, "friends": ["Tom", "Sue"]}', '{"kind": "cat"}', "[1, 2.5, -3]")
        yield from zip(SCHEMAS, values, strict=True)
        return
    found = []
    for path in sorted(folder.rglob("*.jsonl*")):
        data = path.read_bytes()
        for line in (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines():
            record = json.loads(line)
            valid = [test["data"] for test in record.get("tests", ()) if test.get("valid")]
            if valid:
                found.append((record["schema"], json.dumps(valid[0])))
    if not found:
        raise ConfigError(f"--data {folder} has no schema with a valid example")
    yield from random.Random(0).sample(found, min(count, len(found)))


STUDY = Study(
    "Structured output",
    (Claim("decoding under a JSON schema is faster than with outlines or guidance", (ENGINES,)),),
    measure,
)
