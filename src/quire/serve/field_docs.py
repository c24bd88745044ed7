"""All tables of fields, and docs/fields.md, which `python -m quire.serve.field_docs` prints from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.fields import Field, fields_of
from quire.params import SamplingParams
from quire.serve.anthropic.protocol import COUNT_TOKENS, MESSAGES
from quire.serve.fields.foreign import OTHERS_IGNORED, OTHERS_REFUSED
from quire.serve.fields.shapes import Fields, Refused, Shape
from quire.serve.native.programs import PROGRAMS
from quire.serve.native.protocol import CLASSIFY, DETOKENIZE, EMBEDDINGS, POOLING, RERANK, SCORE, TOKENIZE
from quire.serve.openai.chat_protocol import CHAT, CHAT_TOKENS
from quire.serve.openai.protocol import COMPLETIONS
from quire.serve.openai.responses_protocol import RESPONSE_TOKENS, RESPONSES

TABLES: tuple[Fields[Any], ...] = (
    COMPLETIONS,
    CHAT,
    CHAT_TOKENS,
    RESPONSES,
    RESPONSE_TOKENS,
    MESSAGES,
    COUNT_TOKENS,
    EMBEDDINGS,
    POOLING,
    CLASSIFY,
    PROGRAMS,
    SCORE,
    RERANK,
    TOKENIZE,
    DETOKENIZE,
)
# Endpoints that take the same body as another one.
_SAME = ((CHAT_TOKENS, CHAT.path), (RESPONSE_TOKENS, RESPONSES.path))

_PARAMETERS = """
## SamplingParams

The same fields in Python, with what they may be. [More on sampling](sampling.md).

| Parameter | Default | Must be | |
|---|---|---|---|
"""

_HEAD = """# Fields of requests

<!-- Printed by `python -m quire.serve.field_docs`. -->

- `null` is the same as leaving the field out.
- A field that is in none of these tables is ignored. The answer names it in the header `X-Ignored-Fields`, and the
  metric `quire:request_ignored_fields_total` counts it. With `--unknown-fields refuse` it is a 400.
- A name that is nearly that of a known field (`temprature`) is always a 400 with the name that was meant.
- A refused field is a 400, unless its value asks for nothing: false, an empty text, list or object, or a value listed
  here.
- The same holds inside `messages`, `tools`, `response_format` and other objects. A message may also have any field that
  the model's chat template reads.

## Fields of other servers

Every endpoint knows these.

"""


def page() -> str:
    """Write docs/fields.md."""
    parts = [_HEAD, _table("Ignored", OTHERS_IGNORED), "\n", _refused(OTHERS_REFUSED)]
    for fields in TABLES:
        parts.append(f"\n## {fields.path}\n\n")
        same = next((path for table, path in _SAME if table is fields), None)
        parts.append(section(fields) if same is None else f"The same body as {same}.\n")
    return "".join([*parts, _PARAMETERS, *map(_parameter, fields_of(SamplingParams).values())])


def _parameter(field: Field) -> str:
    if not field.sentence:
        return ""
    return f"| `{field.name}` | {field.default} | {field.must} | {field.sentence} |\n"


def section(shape: Shape) -> str:
    """Write the tables of an endpoint or of an inner object."""
    parts = [_table("Taken", _meanings(shape))]
    ignored = {k: v for k, v in shape.ignored.items() if OTHERS_IGNORED.get(k) != v}
    refused = {k: v for k, v in shape.refused.items() if OTHERS_REFUSED.get(k) != v}
    if ignored:
        parts += ["\n", _table("Ignored", ignored)]
    if refused:
        parts += ["\n", _refused(refused)]
    return "".join(parts)


def _meanings(shape: Shape) -> Mapping[str, str]:
    if not isinstance(shape, Fields):
        return shape.taken
    struct: Any = shape.body
    said = fields_of(struct)
    return {name: sentence or said[name].sentence for name, sentence in shape.taken.items()}


def _table(title: str, rows: Mapping[str, str]) -> str:
    lines = [f"| {title} | |", "|---|---|", *(f"| `{name}` | {text} |" for name, text in rows.items())]
    return "\n".join(lines) + "\n"


def _refused(rows: Mapping[str, Refused]) -> str:
    texts = {}
    for name, rule in rows.items():
        allowed = ", ".join(dict.fromkeys(f"`{json.dumps(value)}`" for value in rule.neutral))
        texts[name] = rule.why + (f" ({allowed} is ignored)" if allowed else "")
    return _table("Refused", texts)


if __name__ == "__main__":
    print(page(), end="")
