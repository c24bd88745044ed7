"""Prepares JSON Schemas for the compiler: writes keywords that it lacks in terms of others. Knows no tokens.

Every rewriting keeps this promise: what is valid under the new schema is valid under the old one. Most are equivalent;
narrower ones are marked "narrows". A schema is rewritten from the top, only in places that allow something:
schemas under a negation are negated as given. If a keyword cannot be rewritten, it stays, and the compiler refuses it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from quire.errors import RequestError
from quire.grammar.ecma import translate_patterns
from quire.grammar.negation import Negation

Schema = dict[str, Any]

EFFORTS = (0, 1, 2)
"""EFFORTS to try in turn: the schema nearly as it is; all rewritings; all rewritings in their shortest form."""
MAX_DEPTH = 200
OTHERS = ["null", "boolean", "number", "array", "object"]
MAX_DEPENDENCIES = 4
MAX_DISTINCT = 5
# Keywords whose value is a schema (ONE), a list of schemas, or a map to schemas.
ONE = ("additionalProperties", "additionalItems", "items", "contains", "then", "else")
MANY = ("allOf", "anyOf", "prefixItems", "items")
NAMED = ("properties", "patternProperties", "definitions", "$defs", "dependentSchemas", "dependencies")
# MOVED keywords are replaced; a reference to a place inside them would lead nowhere.
MOVED = ("/oneOf/", "/not", "/if", "/then", "/else", "/dependencies/", "/dependentSchemas/", "/contains")

KNOWN_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
FORMATS = {"duration", "email", "ipv4", "ipv6", "uuid", "uri"}
_DATE = (
    "[1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
# Narrows: replaces a format that the compiler lacks, or takes too widely (leap days and seconds, punycode), by one
# whose texts all have it.
NARROWER_FORMATS: dict[str, Schema] = {
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"pattern": f"^{_DATE}T{_TIME}$"},
    "hostname": {"pattern": r"^[A-Za-z0-9]{1,30}(-[A-Za-z0-9]{1,15})?(\.[A-Za-z0-9]{1,30}){0,4}$"},
    "idn-email": {"format": "email"},
    "idn-hostname": {"pattern": "^[a-z0-9]{1,30}(\\.[a-z0-9]{1,30}){0,4}$"},
    "iri": {"format": "uri"},
    "iri-reference": {"format": "uri"},
    "uri-reference": {"format": "uri"},
    "uri-template": {"pattern": "^[A-Za-z0-9/_.-]*$"},
    "json-pointer": {"pattern": "^(/[A-Za-z0-9_]*)*$"},
    "relative-json-pointer": {"pattern": "^[0-9](/[A-Za-z0-9_]*)*$"},
    "regex": {"pattern": "^[A-Za-z0-9 _-]*$"},
    "byte": {"pattern": "^([A-Za-z0-9+/]{4})*$"},
}


def prepare_schema(schema: Any, closed: bool = False, effort: int = 1) -> Schema:
    """Rewrite to a schema whose instances are all valid under `schema`.

    With `closed`, objects have only the named properties. `effort` is one of `EFFORTS`. Raises RequestError if it is
    not a schema at all.
    """
    if isinstance(schema, bool):
        return {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise RequestError(
            f"the JSON schema must be an object or a boolean, got {type(schema).__name__}",
            "structured_outputs",
        )
    try:
        schema = translate_patterns(schema, " ".join(_references(schema, 0)))
        prepared: Schema = _Rewriter(schema, closed, effort).rewrite(schema, 0)
    except (TypeError, ValueError, AttributeError, KeyError, RecursionError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"the JSON schema is malformed: {error}", "structured_outputs") from error
    return prepared


class _Rewriter:
    """Rewrites one document from the top down."""

    def __init__(self, root: Schema, closed: bool, effort: int) -> None:
        self._closed = closed
        draft = root.get("$schema", "")
        # Before draft 2020-12, a list under `items` meant today's `prefixItems`.
        self._lists = isinstance(draft, str) and ("draft-0" in draft or "2019-09" in draft)
        self._negation = Negation(root, brief=effort > 1)
        fixed = any(part in ref for ref in _references(root, 0) for part in MOVED)
        self._steps: list[Callable[[Schema], None]] = [_format]
        if effort and not fixed:
            self._steps += [self._if, _dependencies, self._not, self._one_of]
            self._steps += [self._contains, _property_names, _distinct, _count]

    def rewrite(self, schema: Any, depth: int) -> Any:
        if not isinstance(schema, dict):
            return schema  # a boolean; or malformed, which the compiler reports
        if depth > MAX_DEPTH:
            raise RequestError(f"the JSON schema is nested more than {MAX_DEPTH} deep", "structured_outputs")
        new = dict(schema)
        for step in self._steps:
            step(new)
        for key in ONE:
            if isinstance(new.get(key), dict):
                new[key] = self.rewrite(new[key], depth + 1)
        for key in MANY:
            if isinstance(new.get(key), list):
                new[key] = [self.rewrite(part, depth + 1) for part in new[key]]
        for key in NAMED:
            if isinstance(new.get(key), dict):
                new[key] = {name: self.rewrite(part, depth + 1) for name, part in new[key].items()}
        if isinstance(new.get("oneOf"), list):
            new["oneOf"] = [_plain_formats(branch, depth) for branch in new["oneOf"]]
        if self._closed and "properties" in new:
            new.setdefault("additionalProperties", False)
        return new

    def _not(self, schema: Schema) -> None:
        if "not" in schema:
            opposite = self._negation.of(schema["not"])
            if opposite is not None:
                del schema["not"]
                _also(schema, opposite)

    def _if(self, schema: Schema) -> None:
        """Narrows if the opposite of `if` cannot be written: then allows only what `if` and `then` allow."""
        if "if" not in schema:
            schema.pop("then", None), schema.pop("else", None)
            return
        test, then, other = schema.pop("if"), schema.pop("then", True), schema.pop("else", True)
        branches = [{"allOf": [test, then]}]
        opposite = self._negation.of(test)
        if opposite is not None:
            branches.append({"allOf": [opposite, other]})
        _also(schema, {"anyOf": branches})

    def _one_of(self, schema: Schema) -> None:
        """Take from each branch what other branches also allow. Narrows: may leave out more."""
        branches = schema.get("oneOf")
        if not isinstance(branches, list) or len(branches) < 2:
            return
        apart: list[Any] = []
        for i, branch in enumerate(branches):
            others = [b for j, b in enumerate(branches) if j != i and not self._negation.disjoint(branch, b)]
            part = self._negation.follow(branch)
            names = part.get("properties", ()) if isinstance(part, dict) else ()
            opposites = [self._negation.of(other, names=names) for other in others]
            if any(opposite is None for opposite in opposites):
                schema["not"] = {}  # the compiler's own proof covers branches that are not rewritten
                return
            apart.append({"allOf": [branch, *opposites]} if opposites else branch)
        del schema["oneOf"]
        _also(schema, {"anyOf": apart})

    def _contains(self, schema: Schema) -> None:
        """Narrows: the first item must match."""
        least = schema.get("minContains", 1)
        if "contains" not in schema or "maxContains" in schema or "prefixItems" in schema or least != 1:
            return
        others = schema.get("items", True)
        if isinstance(others, list):
            return
        first = {"allOf": [schema.pop("contains"), others]}
        schema.pop("minContains", None)
        if self._lists:
            schema["items"], schema["additionalItems"] = [first], others
        else:
            schema["prefixItems"] = [first]
        schema["minItems"] = max(1, schema.get("minItems", 1))


def _references(schema: Any, depth: int) -> list[str]:
    """Collect all values of `$ref` at any depth."""
    found: list[str] = []
    if depth > MAX_DEPTH:
        raise RequestError(f"the JSON schema is nested more than {MAX_DEPTH} deep", "structured_outputs")
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key == "$ref" and isinstance(value, str):
                found.append(value)
            else:
                found += _references(value, depth + 1)
    elif isinstance(schema, list):
        for value in schema:
            found += _references(value, depth + 1)
    return found


def _also(schema: Schema, more: Any) -> None:
    """Require `more` too; appended at the end, so that references to other places stay valid."""
    if more is True:
        return
    if isinstance(more, dict) and not set(more) & set(schema) and "$ref" not in schema:
        schema.update(more)
    else:
        schema["allOf"] = [*schema.get("allOf", ()), more]


def _format(schema: Schema) -> None:
    """Unknown formats are annotations."""
    form = schema.get("format")
    if isinstance(form, str) and form not in FORMATS:
        del schema["format"]
        if form in NARROWER_FORMATS:
            narrower = NARROWER_FORMATS[form]
            typed = schema.get("type")
            _also(
                schema,
                narrower
                if typed == "string"
                else {"anyOf": [{"type": OTHERS}, {"type": "string", **narrower}]},
            )


def _plain_formats(schema: Any, depth: int) -> Any:
    """Drop formats that the compiler lacks: equivalent, for places that must not narrow."""
    if isinstance(schema, list):
        return [_plain_formats(part, depth + 1) for part in schema]
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return schema
    kept = {k: v for k, v in schema.items() if k != "format" or not isinstance(v, str) or v in KNOWN_FORMATS}
    return {k: v if k in ("enum", "const") else _plain_formats(v, depth + 1) for k, v in kept.items()}


def _property_names(schema: Schema) -> None:
    """Rewrite as patterns of properties, if no other keyword constrains properties."""
    names = schema.get("propertyNames")
    if isinstance(names, bool) or not isinstance(names, dict):
        return
    if "patternProperties" in schema or schema.get("properties"):
        return
    known = set(names) - {"type", "description", "title", "$comment"}
    if known - {"pattern", "enum", "minLength", "maxLength"} or len(known & {"pattern", "enum"}) > 1:
        return
    low, high = names.get("minLength", 0), names.get("maxLength", "")
    if "enum" in names and known == {"enum"} and all(isinstance(n, str) for n in names["enum"]):
        pattern = "^(" + "|".join(_escaped(name) for name in names["enum"]) + ")$"
    elif known == {"pattern"} and isinstance(names["pattern"], str):
        pattern = names["pattern"]
    elif known and known <= {"minLength", "maxLength"} and isinstance(low, int):
        pattern = f"^(?s:.){{{low},{high}}}$"
    elif not known:
        pattern = ""
    else:
        return
    del schema["propertyNames"]
    if pattern:
        schema["patternProperties"] = {pattern: schema.get("additionalProperties", True)}
        schema["additionalProperties"] = False


def _required(schema: Schema) -> list[str]:
    required = schema.get("required")
    return required if isinstance(required, list) else []


def _escaped(text: str) -> str:
    return "".join(f"\\{c}" if c in "\\^$.|?*+()[]{}-/" else c for c in text)


def _dependencies(schema: Schema) -> None:
    """Write each as "without the property, or with its needs". Narrows if there are many: requires what all need."""
    needs: list[tuple[str, Any]] = []
    for key in ("dependencies", "dependentRequired", "dependentSchemas"):
        value = schema.get(key)
        if isinstance(value, dict):
            del schema[key]
            needs += [(name, {"required": n} if isinstance(n, list) else n) for name, n in value.items()]
    needs = [(name, need) for name, need in needs if need not in (True, {"required": []})]
    required = _required(schema)
    for name, need in needs:
        if name in required or len(needs) > MAX_DEPENDENCIES:
            _also(schema, {"allOf": [need]})
        else:
            without = {"properties": {name: False}}
            _also(schema, {"allOf": [{"anyOf": [without, {"allOf": [{"required": [name]}, need]}]}]})


def _distinct(schema: Schema) -> None:
    """Narrows: the items of a short enum appear in its order, other values at most once."""
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    if schema.get("uniqueItems") is not True:
        return
    items = schema.get("items")
    low, high = schema.get("minItems", 0), schema.get("maxItems", MAX_DISTINCT)
    values = items.get("enum") if isinstance(items, dict) else None
    if isinstance(values, list) and len(values) <= MAX_DISTINCT and _all_differ(values):
        lists = [
            list(chosen)
            for count in range(low, min(high, len(values)) + 1)
            for chosen in itertools.combinations(values, count)
        ]
        if lists and "prefixItems" not in schema:
            for key in ("uniqueItems", "items", "minItems", "maxItems"):
                schema.pop(key, None)
            typed = schema.get("type", "array")
            others = [t for t in (typed if isinstance(typed, list) else []) if t != "array"]
            schema.pop("type", None)
            branches: list[Schema] = [{"enum": lists}, *([{"type": others}] if others else [])]
            _also(schema, {"anyOf": branches})
    elif low <= 1 and not isinstance(items, list) and "prefixItems" not in schema:
        del schema["uniqueItems"]
        schema["maxItems"] = min(1, high)


def _all_differ(values: list[Any]) -> bool:
    """Whether no two values are equal as JSON; 1 equals 1.0, and true counts as 1 to be safe."""
    return all(a != b for a, b in itertools.combinations(values, 2))


def _count(schema: Schema) -> None:
    """Narrows: if the number of properties is bounded, the named ones are required or absent."""
    if not {"minProperties", "maxProperties"} & set(schema) or "$ref" in schema:
        return
    properties, required = schema.get("properties"), list(_required(schema))
    if not isinstance(properties, dict) or not properties or "patternProperties" in schema:
        return
    if set(properties) <= set(required):
        return
    low, high = schema.get("minProperties", 0), schema.get("maxProperties", len(properties))
    optional = [name for name in properties if name not in required and properties[name] is not False]
    if not isinstance(low, int) or not isinstance(high, int) or high < len(required):
        return
    chosen = required + optional[: max(0, low - len(required))]
    if len(chosen) < low:
        return
    if len(required) < low or "maxProperties" in schema:
        schema["required"] = chosen
    if "maxProperties" in schema:
        schema["properties"] = {name: part for name, part in properties.items() if name in chosen}
        schema["additionalProperties"] = False
    schema.pop("minProperties", None)
    schema.pop("maxProperties", None)
