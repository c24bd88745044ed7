r"""Structural tags: free text until a trigger, then a constrained part. Writes Lark for llguidance; knows no tokens.

Two notations are read, both as vLLM and XGrammar have them. The older one:

    {"type": "structural_tag", "triggers": ["<function="],
     "structures": [{"begin": "<function=f>", "schema": {...}, "end": "</function>"}]}

The newer one nests formats: {"type": "structural_tag", "format": F} with F one of

    {"type": "const_string", "value": TEXT}        {"type": "json_schema", "json_schema": SCHEMA}
    {"type": "regex", "pattern": REGEX}            {"type": "grammar", "grammar": EBNF or Lark, "quoted": false}
    {"type": "any_text"}                           {"type": "sequence" or "or", "elements": [F, ...]}
    {"type": "optional", "content": F}             {"type": "tag", "begin": TEXT, "content": F, "end": TEXT}
    {"type": "triggered_tags", "triggers": [TEXT, ...], "tags": [tag, ...],
     "at_least_one": false, "stop_after_first": false}
    {"type": "tags_with_separator", "tags": [tag, ...], "separator": TEXT,
     "at_least_one": false, "stop_after_first": false}

A `quoted` grammar describes a text inside a JSON string (`quire.grammar.quoted`).
In `triggered_tags` the text is free; when it reaches a trigger, one of the tags that begin with it must follow.
With `at_least_one` the output cannot end before the first tag; with `stop_after_first` it ends after it.
Text that names a special token (`<|tool_call|>`) means that token, which free text never contains.

Tool calls that are required, with text allowed before them:

    SamplingParams(structured_outputs=StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": {
        "type": "triggered_tags", "triggers": ["<tool_call>"], "at_least_one": True, "tags": [{
            "type": "tag", "begin": '<tool_call>\n{"name":"f","arguments":', "end": "}\n</tool_call>",
            "content": {"type": "json_schema", "json_schema": SCHEMA}}]}}))

Without text before: {"type": "tags_with_separator", "tags": [...], "separator": "\n", "at_least_one": True}.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from quire.errors import RequestError
from quire.grammar.quoted import quoted
from quire.lazy import Lazy

if TYPE_CHECKING:
    import llguidance
else:
    llguidance = Lazy("llguidance")

MAX_FORMATS = 4096
MAX_DEPTH = 64
Expression = str


def _refuse(message: str) -> RequestError:
    return RequestError(f"structural_tag: {message}", "structured_outputs")


class TagWriter:
    """Writes one structural tag as a grammar.

    `special` maps names of special tokens to ids; `json_schema` makes a schema ready for llguidance; `lark` turns
    EBNF into Lark.
    """

    def __init__(
        self,
        special: Mapping[str, int],
        json_schema: Callable[[Any], dict[str, Any]],
        lark: Callable[[str], str],
    ) -> None:
        self._special = special
        names = sorted(special, key=len, reverse=True)
        self._named = re.compile("|".join(map(re.escape, names))) if names else None
        self._json_schema = json_schema
        self._lark = lark
        self._rules: list[str] = []
        self._grammars: list[dict[str, Any]] = []
        self._count = 0

    def write(self, tag: Any) -> str:
        """Write the grammar as llguidance's JSON. RequestError if the tag is malformed."""
        if not isinstance(tag, dict) or tag.get("type", "structural_tag") != "structural_tag":
            raise _refuse('it must be an object with "type": "structural_tag"')
        form = tag.get("format")
        if form is None:
            form = _from_structures(tag)
        start = self._expression(form, 0)
        rules = [f"start: {start}", *self._rules, "TEXT: /(?s:.*)/"]
        main = {"name": "tags", "lark_grammar": "%llguidance {}\n" + "\n".join(rules) + "\n"}
        return json.dumps({"grammars": [main, *self._grammars]}, ensure_ascii=False)

    def _name(self, kind: str) -> str:
        self._count += 1
        if self._count > MAX_FORMATS:
            raise _refuse(f"it has more than {MAX_FORMATS} parts")
        return f"{kind}_{self._count}"

    def _rule(self, kind: str, body: str, attribute: str = "") -> Expression:
        name = self._name(kind)
        self._rules.append(f"{name}{attribute}: {body}")
        return name

    def literal(self, text: str) -> Expression:
        """Write a text as strings and special tokens."""
        parts: list[str] = []
        at = 0
        for found in self._named.finditer(text) if self._named else ():
            if found.start() > at:
                parts.append(json.dumps(text[at : found.start()], ensure_ascii=False))
            parts.append(f"<[{self._special[found.group()]}]>")
            at = found.end()
        if at < len(text):
            parts.append(json.dumps(text[at:], ensure_ascii=False))
        return " ".join(parts)

    def _until(self, end: str) -> Expression:
        """Write free text up to and including the first `end`."""
        if self._named is not None and (found := self._named.match(end)):
            rest = self.literal(end[found.end() :])
            return f"(TEXT <[{self._special[found.group()]}]> {rest})"
        found = self._named.search(end) if self._named else None
        plain = end[: found.start()] if found else end
        rest = self.literal(end[len(plain) :])
        quoted = json.dumps(plain, ensure_ascii=False)
        return f"({self._rule('until', f'TEXT {quoted}', '[lazy]')} {rest})"

    def _expression(self, form: Any, depth: int) -> Expression:
        if not isinstance(form, dict):
            raise _refuse(f"a format must be an object, got {type(form).__name__}")
        if depth > MAX_DEPTH:
            raise _refuse(f"formats are nested more than {MAX_DEPTH} deep")
        kind = form.get("type")
        if kind == "const_string":
            return self.literal(_text(form, "value"))
        if kind == "json_schema":
            schema = self._json_schema(form.get("json_schema", True))
            return self._side_grammar({"json_schema": schema})
        if kind == "regex":
            return self._rule("regex", f"/{llguidance.regex_to_lark(_text(form, 'pattern'), 'd')}/")
        if kind == "grammar":
            lark = self._lark(_text(form, "grammar"))
            return self._side_grammar({"lark_grammar": quoted(lark) if _flag(form, "quoted") else lark})
        if kind == "any_text":
            return "TEXT"
        if kind == "optional":
            return f"({self._expression(form.get('content'), depth + 1)})?"
        if kind in ("sequence", "or"):
            parts = [self._expression(part, depth + 1) for part in _list(form, "elements")]
            return "(" + (" " if kind == "sequence" else " | ").join(parts) + ")"
        if kind == "tag":
            return self._tag(form, _text(form, "begin"), depth)
        if kind == "triggered_tags":
            return self._triggered(form, depth)
        if kind == "tags_with_separator":
            return self._separated(form, depth)
        raise _refuse(f"format type {str(kind)[:64]!r} is not supported")

    def _side_grammar(self, grammar: dict[str, Any]) -> Expression:
        name = self._name("part")
        self._grammars.append({"name": name, **grammar})
        return f"@{name}"

    def _tag(self, form: Any, begin: str, depth: int) -> Expression:
        """Write a tag; `begin` is the rest of its beginning that is still to be written."""
        if not isinstance(form, dict) or form.get("type", "tag") != "tag":
            raise _refuse("tags must hold objects of type tag")
        content = form.get("content")
        end = form.get("end", "")
        ends = end if isinstance(end, list) else [end]
        if not ends or not all(isinstance(e, str) for e in ends):
            raise _refuse("end must be a text or a list of texts")
        if isinstance(content, dict) and content.get("type") == "any_text" and all(ends):
            tail = " | ".join(self._until(e) for e in ends)
        else:
            closing = " | ".join(self.literal(e) or '""' for e in ends)
            tail = f"{self._expression(content, depth + 1)} ({closing})"
        return self._rule("tag", f"{self.literal(begin)} ({tail})")

    def _triggered(self, form: dict[str, Any], depth: int) -> Expression:
        triggers = _list(form, "triggers")
        tags = _list(form, "tags")
        if not all(isinstance(t, str) and t for t in triggers):
            raise _refuse("triggers must be texts that are not empty")
        groups: dict[str, list[Expression]] = {}
        for tag in tags:
            begin = _text(tag, "begin") if isinstance(tag, dict) else ""
            matching = [t for t in triggers if begin.startswith(t)]
            if not matching:
                raise _refuse(f"the tag that begins {begin[:80]!r} begins with none of the triggers")
            trigger = max(matching, key=len)
            groups.setdefault(trigger, []).append(self._tag(tag, begin[len(trigger) :], depth + 1))
        branches = [f"{self._until(t)} ({' | '.join(tails)})" for t, tails in groups.items()]
        one = self._rule("triggered", " | ".join(branches))
        needed, single = _flag(form, "at_least_one"), _flag(form, "stop_after_first")
        if single:
            return one if needed else f"({one} | TEXT)"
        return f"({one}{'+' if needed else '*'} TEXT)"

    def _separated(self, form: dict[str, Any], depth: int) -> Expression:
        tags = [self._tag(tag, _text(tag, "begin"), depth + 1) for tag in _list(form, "tags")]
        one = self._rule("choice", " | ".join(tags))
        needed, single = _flag(form, "at_least_one"), _flag(form, "stop_after_first")
        separator = self.literal(_text(form, "separator") if "separator" in form else "")
        body = one if single else f"({one} ({separator} {one})*)"
        return body if needed else f"({body})?"


def _text(form: Any, name: str) -> str:
    value = form.get(name) if isinstance(form, dict) else None
    if not isinstance(value, str):
        raise _refuse(f"{name} must be a text, got {type(value).__name__}")
    return value


def _list(form: dict[str, Any], name: str) -> list[Any]:
    value = form.get(name)
    if not isinstance(value, list) or not value:
        raise _refuse(f"{name} must be a list that is not empty")
    return value


def _flag(form: dict[str, Any], name: str) -> bool:
    value = form.get(name, False)
    if not isinstance(value, bool):
        raise _refuse(f"{name} must be true or false")
    return value


def _from_structures(tag: dict[str, Any]) -> dict[str, Any]:
    """Convert the older notation to the newer."""
    tags = []
    for part in _list(tag, "structures"):
        if not isinstance(part, dict):
            raise _refuse("structures must hold objects")
        content = {"type": "json_schema", "json_schema": part.get("schema", True)}
        begin, end = _text(part, "begin"), _text(part, "end")
        tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
    return {"type": "triggered_tags", "triggers": _list(tag, "triggers"), "tags": tags}
