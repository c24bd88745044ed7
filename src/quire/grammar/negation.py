"""Negates a JSON Schema, as a schema: `not`, `oneOf` and `if` can then be written without them.

A negation is sound but may be incomplete: nothing that it allows is valid under the schema it negates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

Schema = dict[str, Any]

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
MAX_DEPTH = 24
MAX_BRANCHES = 24


class Negation:
    """Negates schemas of one document and follows its local references. `brief`: use one of many possible ways."""

    def __init__(self, root: Schema, brief: bool = False) -> None:
        self._root = root
        self._brief = brief

    def of(self, schema: Any, depth: int = 0, names: Iterable[str] = ()) -> Any:
        """Write a schema of instances that are not valid under `schema`, or None if none can be written.

        `names` are properties that such an instance may have: one that `schema` does not know may exclude it.
        """
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return None
        schema = self.follow(schema)
        branches: list[Any] = []
        for key, value in schema.items():
            rule = RULES.get(key)
            if rule is not None:
                branches += rule(self, value, depth + 1)
        known = _closed_to(schema)
        if known is not None:
            branches += [{"type": "object", "required": [name]} for name in names if name not in known]
        branches = [branch for branch in branches if branch is not False]
        if not schema or not branches:
            return None if schema else False
        if len(branches) > MAX_BRANCHES:
            return None
        if self._brief:
            return min(branches, key=lambda branch: len(json.dumps(branch)))
        return branches[0] if len(branches) == 1 else {"anyOf": branches}

    def follow(self, schema: Any) -> Any:
        """Return `schema`, or its target if it is a local reference and nothing else."""
        for _ in range(MAX_DEPTH):
            ref = schema.get("$ref") if isinstance(schema, dict) else None
            if not isinstance(ref, str):
                return schema
            target: Any = self._root
            if not ref.startswith("#") or (len(ref) > 1 and ref[1] != "/"):
                return {}
            for part in ref[2:].split("/") if len(ref) > 1 else ():
                name = part.replace("~1", "/").replace("~0", "~")
                if isinstance(target, dict) and name in target:
                    target = target[name]
                elif isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                    target = target[int(name)]
                else:
                    return {}
            schema = target
        return {}

    def disjoint(self, a: Any, b: Any, depth: int = 0) -> bool:
        """Whether types, values or properties show that nothing is valid under both."""
        a, b = self.follow(a), self.follow(b)
        if a is False or b is False:
            return True
        if not isinstance(a, dict) or not isinstance(b, dict) or depth > 4:
            return False
        types_a, types_b = _types(a), _types(b)
        if not types_a & types_b:
            return True
        values_a, values_b = _values(a), _values(b)
        if values_a is not None and values_b is not None:
            return not {json.dumps(v) for v in values_a} & {json.dumps(v) for v in values_b}
        if types_a & types_b != {"object"}:
            return False
        for one, other in ((a, b), (b, a)):
            known = _closed_to(one)
            if known is not None and _names(other.get("required")) - known:
                return True
        needed = _names(a.get("required")) & _names(b.get("required"))
        parts_a, parts_b = a.get("properties"), b.get("properties")
        if not isinstance(parts_a, dict) or not isinstance(parts_b, dict):
            return False
        return any(
            self.disjoint(parts_a[name], parts_b[name], depth + 1)
            for name in needed
            if name in parts_a and name in parts_b
        )


def _types(schema: Schema) -> set[str]:
    """List the types that instances may have; integers count as numbers."""
    values = _values(schema)
    if values is not None:
        return {_type_of(value) for value in values}
    kind = schema.get("type", list(TYPES))
    return {"number" if k == "integer" else k for k in ([kind] if isinstance(kind, str) else kind)}


def _closed_to(schema: Schema) -> set[str] | None:
    """List the only names that properties may have, or None if others are allowed."""
    if schema.get("additionalProperties") is not False or schema.get("patternProperties"):
        return None
    properties = schema.get("properties", {})
    return set(properties) if isinstance(properties, dict) else None


def _values(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _names(value: Any) -> set[str]:
    return {name for name in value if isinstance(name, str)} if isinstance(value, list) else set()


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    kinds: dict[type, str] = {int: "number", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


Rule = Callable[[Negation, Any, int], list[Any]]


def _other_types(types: set[str]) -> list[Any]:
    """Allow instances of none of `types`. A non-integer number cannot be expressed, so numbers go as a whole."""
    if types & {"integer", "number"}:
        types = types | {"integer", "number"}
    rest = [t for t in TYPES if t not in types and t != "integer"]
    return [{"type": rest if len(rest) > 1 else rest[0]}] if rest else []


def _not_type(negation: Negation, value: Any, depth: int) -> list[Any]:
    kinds = [value] if isinstance(value, str) else value
    return _other_types(set(kinds)) if isinstance(kinds, list) and set(map(type, kinds)) <= {str} else []


def _not_enum(negation: Negation, value: Any, depth: int) -> list[Any]:
    if not isinstance(value, list):
        return []
    found = _other_types({_type_of(v) for v in value})
    if {True, False} & {v for v in value if isinstance(v, bool)} and not all(
        any(v is b for v in value) for b in (True, False)
    ):
        found.append({"enum": [b for b in (True, False) if not any(v is b for v in value)]})
    texts = [v for v in value if isinstance(v, str)]
    if texts and sum(map(len, texts)) < 4096:
        found.append({"type": "string", "pattern": f"^({other_texts(texts)})$"})
    numbers = [v for v in value if _type_of(v) == "number"]
    if numbers:
        found += [{"type": "number", "exclusiveMaximum": min(numbers)}]
        found += [{"type": "number", "exclusiveMinimum": max(numbers)}]
    return found


def other_texts(texts: list[str]) -> str:
    """Write a regex of all other texts: at each place, a character that continues none of these, or an early end."""
    ends = "" in texts
    branches: list[str] = []
    heads = sorted({text[0] for text in texts if text})
    others = "".join(f"\\x{{{ord(head):x}}}" for head in heads)
    branches.append(f"[^{others}](?s:.)*" if heads else "(?s:.)+")
    for head in heads:
        rest = other_texts([text[1:] for text in texts if text[:1] == head])
        branches.append(f"\\x{{{ord(head):x}}}({rest})")
    if not ends:
        branches.append("")
    return "|".join(branches)


def _not_required(negation: Negation, value: Any, depth: int) -> list[Any]:
    return [{"type": "object", "properties": {name: False}} for name in sorted(_names(value))]


def _not_properties(negation: Negation, value: Any, depth: int) -> list[Any]:
    found: list[Any] = []
    for name, part in value.items() if isinstance(value, dict) else ():
        opposite = negation.of(part, depth)
        if opposite not in (None, False):
            found.append({"type": "object", "properties": {name: opposite}, "required": [name]})
    return found


def _not_any(negation: Negation, value: Any, depth: int) -> list[Any]:
    opposites = [negation.of(part, depth) for part in value] if isinstance(value, list) else [None]
    if any(opposite is None or opposite is False for opposite in opposites):
        return []
    return [opposites[0] if len(opposites) == 1 else {"allOf": opposites}]


def _not_all(negation: Negation, value: Any, depth: int) -> list[Any]:
    opposites = [negation.of(part, depth) for part in value] if isinstance(value, list) else []
    return [opposite for opposite in opposites if opposite is not None]


def _bound(kind: str, keyword: str, shift: int = 0) -> Rule:
    """Negate a bound on instances of type `kind`, by the bound `keyword`, shifted by `shift`."""

    def rule(negation: Negation, value: Any, depth: int) -> list[Any]:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or (shift and value + shift < 0):
            return []
        return [{"type": kind, keyword: value + shift}]

    return rule


RULES: dict[str, Rule] = {
    "type": _not_type,
    "enum": _not_enum,
    "const": lambda negation, value, depth: _not_enum(negation, [value], depth),
    "required": _not_required,
    "properties": _not_properties,
    "anyOf": _not_any,
    "oneOf": _not_any,
    "allOf": _not_all,
    "not": lambda negation, value, depth: [value],
    "minimum": _bound("number", "exclusiveMaximum"),
    "maximum": _bound("number", "exclusiveMinimum"),
    "exclusiveMinimum": _bound("number", "maximum"),
    "exclusiveMaximum": _bound("number", "minimum"),
    "minLength": _bound("string", "maxLength", -1),
    "maxLength": _bound("string", "minLength", 1),
    "minItems": _bound("array", "maxItems", -1),
    "maxItems": _bound("array", "minItems", 1),
    "minProperties": _bound("object", "maxProperties", -1),
    "maxProperties": _bound("object", "minProperties", 1),
}
