"""Matches modules with a quantization's settings: names, wildcards and expressions. Knows no tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire.errors import ModelError
from quire.weights.expressions import Expressions

WHERE = "quantization_config"
SKIPS = (
    "modules_to_not_convert",
    "ignored_layers",
    "ignore",
    "exclude_modules",
    "llm_int8_skip_modules",
    "exclude",
)
WILD = re.compile(r"\[[!^]?\]?[^\]]*\]|.", re.DOTALL)
SIGNS = {"*": ".*", "?": "."}


def short_name(name: str) -> str:
    """Drop the part of a module's name, or a rule, that names the language model within a larger one."""
    return name.replace("language_model\\.", "").replace("language_model.", "")


def texts(settings: Mapping[str, Any], key: str) -> Sequence[str]:
    """Read a list of texts; none if there is no such key. ModelError."""
    value = settings.get(key) or ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) for text in value):
        raise ModelError(f"{WHERE}: {key} must be a list of texts, got {value!r:.80}")
    return value


class Rules:
    """Rules that pick modules: a name, its end, an enclosing module, each with wildcards, or a "re:" expression.

    ModelError for any other rule.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._plain: dict[str, int] = {}
        self._numbers: list[int] = []  # of the rules that are expressions
        expressions = []
        for number, pattern in enumerate(map(short_name, patterns)):
            if pattern.startswith("re:"):
                expressions.append(pattern[3:])
                self._numbers.append(number)
            elif any(sign in pattern for sign in "*?["):
                expressions.append(rf"{_wild(pattern.rstrip('.'))}(\..*)?$")
                self._numbers.append(number)
            else:
                self._plain.setdefault(pattern.rstrip("."), number)
        self._expressions = Expressions(expressions, WHERE)

    @classmethod
    def skipped(cls, settings: Mapping[str, Any]) -> Rules:
        """Make the rules of modules that stay float."""
        return cls(pattern for key in SKIPS for pattern in texts(settings, key))

    def first(self, module: str) -> int | None:
        """Return the number of the first rule that picks a module."""
        if not self._plain and not self._numbers:
            return None
        module = short_name(module)
        parts = module.split(".") if self._plain else []
        names = [".".join(part) for end in range(len(parts)) for part in (parts[: end + 1], parts[end:])]
        found = [self._plain[name] for name in names if name in self._plain]
        matched = self._expressions.first(module)
        return min(found if matched is None else [*found, self._numbers[matched]], default=None)

    def match(self, module: str) -> bool:
        return self.first(module) is not None


def _wild(pattern: str) -> str:
    """Write a pattern with wildcards as an expression."""

    def part(found: re.Match[str]) -> str:
        sign = found[0]
        if sign[0] == "[" and len(sign) > 2:
            return f"[^{sign[2:]}" if sign[1] == "!" else sign
        return SIGNS.get(sign) or re.escape(sign)

    return WILD.sub(part, pattern)


class Dynamic:
    """GPTQModel's `dynamic`: expressions, and the settings that they change for modules. ModelError."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        given = settings.get("dynamic") or {}
        if not isinstance(given, dict):
            raise ModelError(f"{WHERE}: dynamic must be an object, got {given!r:.80}")
        self._changes = [
            None if pattern.startswith("-:") else changes if isinstance(changes, dict) else {}
            for pattern, changes in given.items()
        ]
        plain = (pattern.removeprefix("+:").removeprefix("-:") for pattern in given)
        self._expressions = Expressions(plain, f"{WHERE}: dynamic")

    def changes(self, module: str) -> Mapping[str, Any] | None:
        """Return a module's changes by the first expression that matches; None: it stays float."""
        found = self._expressions.first(module)
        return {} if found is None else self._changes[found]


class Targets:
    """Groups of compressed-tensors, each for the modules that its targets name. ModelError for other settings.

    A module's own name goes before an expression, which goes before the class Linear.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        groups = settings.get("config_groups")
        if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
            raise ModelError(f"{WHERE} (compressed-tensors): config_groups is missing")
        self.groups = list(groups.values())
        self._names: dict[str, Mapping[str, Any]] = {}
        expressions = []
        self._matched: list[Mapping[str, Any]] = []
        for group in self.groups:
            for target in map(short_name, texts(group, "targets")):
                if target.startswith("re:"):
                    expressions.append(target[3:])
                    self._matched.append(group)
                else:
                    self._names.setdefault(target, group)
        self._expressions = Expressions(expressions, WHERE)

    def group(self, module: str) -> Mapping[str, Any] | None:
        """Return the settings of a module's group; None: it is in no group."""
        module = short_name(module)
        if module in self._names:
            return self._names[module]
        found = self._expressions.first(module)
        return self._names.get("Linear") if found is None else self._matched[found]
