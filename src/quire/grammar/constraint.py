"""Writes a request's constraint in llguidance's notation. Knows JSON Schema, regexes, EBNF; no tokens but by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.errors import RequestError
from quire.grammar.schema import prepare_schema
from quire.grammar.tags import TagWriter
from quire.lazy import Lazy
from quire.params import StructuredOutputsParams

if TYPE_CHECKING:
    import llguidance
else:
    llguidance = Lazy("llguidance")

MAX_EBNF = 1 << 17
SOME_WHITESPACE = r"[ \n]{0,8}"
"""SOME_WHITESPACE is allowed in JSON unless a pattern is given: bounded, as a model may never stop indenting."""


def refuse(message: str) -> RequestError:
    return RequestError(message, "structured_outputs")


def grammar_text(params: StructuredOutputsParams, special: Mapping[str, int], effort: int = 0) -> str:
    """Write the constraint as a Lark grammar or as llguidance's JSON.

    `special` maps the names of special tokens, which free text never contains, to their ids: structural tags may name
    them. `effort` selects how schemas are rewritten (`schema.EFFORTS`). Raises RequestError for malformed input; errors
    that only compiling shows are left to `GrammarCompiler`.
    """
    if params.regex is not None:
        text: str = llguidance.LLMatcher.grammar_from_regex(params.regex)
        return text
    if params.choice is not None:
        return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in params.choice)
    if params.grammar is not None:
        return _ebnf(params.grammar)
    if params.structural_tag is not None:
        tag = read_json(params.structural_tag, "structural_tag")
        return TagWriter(special, lambda schema: json_schema(schema, params, effort), _ebnf).write(tag)
    schema = {"type": "object"} if params.json is None else read_json(params.json, "json")
    return json.dumps(
        {"grammars": [{"json_schema": json_schema(schema, params, effort)}]}, ensure_ascii=False
    )


def read_json(text: object, name: str) -> Any:
    """Parse JSON. Raises RequestError if `text` is not JSON."""
    try:
        return json.loads(str(text))
    except (ValueError, RecursionError) as error:
        raise refuse(f"{name} is not valid JSON: {error}") from error


def json_schema(schema: Any, params: StructuredOutputsParams, effort: int) -> dict[str, Any]:
    """Write the schema in llguidance's form, including its options."""
    prepared = prepare_schema(schema, params.disable_additional_properties, effort)
    pattern = params.whitespace_pattern
    if pattern is None and params.disable_any_whitespace is False:
        pattern = SOME_WHITESPACE
    options: dict[str, Any] = {"whitespace_flexible": False}
    if pattern is not None:
        options = {"whitespace_flexible": True, "whitespace_pattern": pattern}
    return {**prepared, "x-guidance": options}


def _ebnf(text: str) -> str:
    """Return Lark unchanged; convert EBNF with `root ::= ...` (llama.cpp's GBNF) to Lark."""
    if len(text) > MAX_EBNF:
        raise refuse(f"grammar has {len(text)} characters, the most is {MAX_EBNF}")
    try:
        lark: str = llguidance.gbnf_to_lark.any_to_lark(text)
    except Exception as error:  # the library raises bare Exception, and IndexError if the text ends early
        raise refuse(f"grammar is neither EBNF nor Lark: {error}") from error
    return lark
