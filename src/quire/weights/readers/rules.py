"""Matches modules with a quantization's settings: names, wildcards and expressions. Knows no tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sized
from fnmatch import translate
from typing import Any

from quire.errors import ModelError

MAX_PATTERN = 4096
MAX_NAME = 256  # longer names of modules match no expression
MAX_REPEATS = 6
MAX_EXPRESSIONS = 4096
SKIPS = (
    "modules_to_not_convert",
    "ignored_layers",
    "ignore",
    "exclude_modules",
    "llm_int8_skip_modules",
    "exclude",
)
REPEATS = re.compile(r"(?<!\\)(?:[*+]|\{\d*,)")


def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a rule's expression. Raises ModelError if it is invalid or can take very long to match."""
    if len(pattern) > MAX_PATTERN:
        raise ModelError(
            f"quantization_config: a rule has more than {MAX_PATTERN} characters: {pattern[:80]!r}"
        )
    slow = re.search(r"(?<!\\)\)(?:[*+]|\{\d*,)", pattern)
    if slow or any(len(REPEATS.findall(branch)) > MAX_REPEATS for branch in pattern.split("|")):
        raise ModelError(
            f"quantization_config: the rule {pattern[:80]!r} repeats groups, or too much: use a simpler expression"
        )
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ModelError(
            f"quantization_config: the rule {pattern[:80]!r} is no regular expression: {error}"
        ) from error


def short_name(name: str) -> str:
    """Drop the part of a module's name, or a rule, that names the language model within a larger one."""
    return name.replace("language_model\\.", "").replace("language_model.", "")


def check_count(expressions: Sized) -> None:
    """Refuse too many expressions: each module is compared with all of them."""
    if len(expressions) > MAX_EXPRESSIONS:
        raise ModelError(
            f"quantization_config: it has {len(expressions)} expressions; {MAX_EXPRESSIONS} are read"
        )


def matches(expression: re.Pattern[str], module: str) -> bool:
    """Whether an expression matches the beginning of a module's name, as all formats have it."""
    return len(module) <= MAX_NAME and expression.match(module) is not None


class Rules:
    """Rules that pick modules: a name, its end, an enclosing module, each with wildcards, or a "re:" expression.

    ModelError for any other rule.
    """

    def __init__(self, patterns: Iterable[object]) -> None:
        self._plain: set[str] = set()
        self._expressions: list[re.Pattern[str]] = []
        for pattern in patterns:
            if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN:
                raise ModelError(f"quantization_config: a rule must be a short text, got {pattern!r:.80}")
            pattern = short_name(pattern)
            if pattern.startswith("re:"):
                self._expressions.append(compiled(pattern[3:]))
            elif any(sign in pattern for sign in "*?["):
                wild = (pattern, f"{pattern.rstrip('.')}.*")
                self._expressions += [re.compile(translate(name)) for name in wild]
            else:
                self._plain.add(pattern.rstrip("."))
        check_count(self._expressions)

    @classmethod
    def skipped(cls, settings: Mapping[str, Any]) -> Rules:
        """Make the rules of modules that stay float."""
        return cls(pattern for key in SKIPS for pattern in settings.get(key) or ())

    def match(self, module: str) -> bool:
        module = short_name(module)
        parts = module.split(".")
        ends = range(len(parts))
        inside = any(
            ".".join(parts[: end + 1]) in self._plain or ".".join(parts[end:]) in self._plain for end in ends
        )
        return inside or any(matches(expression, module) for expression in self._expressions)


class Targets:
    """Groups of compressed-tensors, each for the modules that its targets name. ModelError for other settings.

    A module's own name goes before an expression, which goes before the class Linear.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        groups = settings.get("config_groups")
        if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
            raise ModelError("quantization_config (compressed-tensors): config_groups is missing")
        self.groups = list(groups.values())
        self._names: dict[str, Mapping[str, Any]] = {}
        self._expressions: list[tuple[re.Pattern[str], Mapping[str, Any]]] = []
        for group in groups.values():
            for target in group.get("targets") or ():
                if not isinstance(target, str):
                    raise ModelError(f"quantization_config: a target must be a text, got {target!r:.80}")
                target = short_name(target)
                if target.startswith("re:"):
                    self._expressions.append((compiled(target[3:]), group))
                else:
                    self._names.setdefault(target, group)
        check_count(self._expressions)

    def group(self, module: str) -> Mapping[str, Any] | None:
        """Return the settings of a module's group; None: it is in no group."""
        module = short_name(module)
        if module in self._names:
            return self._names[module]
        matching = (group for rule, group in self._expressions if matches(rule, module))
        return next(matching, self._names.get("Linear"))
