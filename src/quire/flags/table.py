"""Flags of other engines that Quire lacks: which change nothing here, and which are refused. vllm.yaml has vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quire.config import SECTIONS
from quire.errors import ConfigError
from quire.lazy import Lazy

if TYPE_CHECKING:
    import yaml
else:
    yaml = Lazy("yaml")

Takes = Literal["value", "switch", "list"]
# Read when an option is met that Quire lacks.
Table = Callable[[], Mapping[str, "ForeignFlag"]]


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """Flag of another engine by its option name (with underscores).

    `neutral` are the values that change nothing; None: all of them. Any other value is refused, and `nearest` says what
    to use in its place. `older` flags belong to earlier versions. `dashes` in place of underscores.
    """

    name: str
    takes: Takes
    why: str
    neutral: tuple[str, ...] | None = None
    nearest: str = ""
    older: bool = False
    dashes: bool = True

    @property
    def flag(self) -> str:
        """Spell the flag as its engine does."""
        return "--" + (self.name.replace("_", "-") if self.dashes else self.name)

    def accepts(self, value: object) -> bool:
        """Tell whether the value changes no result here."""
        if self.neutral is None or value is None or (value is False and self.takes == "switch"):
            return True
        return str(value).lower() in self.neutral

    @property
    def fate(self) -> str:
        """For the docs."""
        if self.neutral is None:
            return "accepted"
        return f"accepted if {' or '.join(self.neutral)}" if self.neutral else "refused"


def entries(names: str) -> Iterator[tuple[str, Takes, tuple[str, ...]]]:
    """Read the names in a group: each with what it takes and the values that change nothing."""
    for word in names.split():
        name, _, values = word.partition("=")
        takes: Takes = "switch" if name[-1] == "!" else "list" if name[-1] == "*" else "value"
        yield name.rstrip("!*"), takes, tuple(value for value in values.split(",") if value)


def foreign_table(
    accepted: Sequence[tuple[str, str]],
    refused: Sequence[tuple[str, str, str]],
    older: bool = False,
    dashes: bool = True,
) -> dict[str, ForeignFlag]:
    """Make a table of groups: (why, names) that change nothing, (why, nearest, names) that would."""
    found = [
        ForeignFlag(name, takes, why, older=older, dashes=dashes)
        for why, names in accepted
        for name, takes, _ in entries(names)
    ]
    found += [
        ForeignFlag(name, takes, why, neutral, nearest, older, dashes)
        for why, nearest, names in refused
        for name, takes, neutral in entries(names)
    ]
    return {flag.name: flag for flag in found}


@cache
def engine_flags() -> dict[str, ForeignFlag]:
    """Read vLLM's flags that the options of an engine and a server lack."""
    return vllm_flags("engine") | vllm_flags("older")


@cache
def vllm_flags(part: str) -> dict[str, ForeignFlag]:
    """Read the flags in a part of vllm.yaml."""
    groups = vllm_data()[part]
    accepted = [(group["why"], group["flags"]) for group in groups.get("accepted", ())]
    refused = [(group["why"], group["nearest"], group["flags"]) for group in groups.get("refused", ())]
    return foreign_table(accepted, refused, older=part == "older")


@cache
def vllm_data() -> dict[str, Any]:
    """Read vllm.yaml: its parts by name."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # six times as fast where PyYAML was built with it
    text = Path(__file__).with_name("vllm.yaml").read_text("utf-8")
    found: dict[str, Any] = yaml.load(text, Loader=loader)
    return found


ENGINE_OPTIONS = frozenset(f.name for section in SECTIONS.values() for f in fields(section)) | {"seed"}


def take_foreign(
    options: dict[str, Any], own: Container[str] = ENGINE_OPTIONS, table: Table = engine_flags
) -> list[str]:
    """Remove options that change nothing here (by field name); returns a line about each.

    `own` options stay; the table, by default vLLM's, is read if there are others. Raises ConfigError for one that would
    change a result.
    """
    others = [name for name in options if name not in own]
    return take_flags(options, table(), others) if others else []


def take_flags(
    options: dict[str, Any], table: Mapping[str, ForeignFlag], names: list[str] | None = None
) -> list[str]:
    """Do the same by a table, for all options or for `names`."""
    notices = []
    for name in [name for name in (options if names is None else names) if name in table]:
        value = options.pop(name)
        flag = table[name]
        if not flag.accepts(value):
            raise ConfigError(refusal(flag, value))
        if value is not None and value is not False:
            notices.append(notice(flag))
    return notices


def notice(flag: ForeignFlag) -> str:
    """Say that an option changes nothing, and why."""
    why = flag.why if flag.why.startswith("Quire") else flag.why[0].lower() + flag.why[1:]
    return f"{flag.flag} changes nothing: {why}"


def refusal(flag: ForeignFlag, value: object) -> str:
    """Say why `value` of `flag` is refused, and what to use."""
    given = "" if value is True else f" {value}"
    return f"{flag.flag}{given} is not supported: {flag.why}; nearest is {flag.nearest}"
