"""Command-line flags made of dataclass fields, and their values in all the spellings that vLLM takes."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from quire.devices.choices import DECIDED
from quire.flags.table import ForeignFlag

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT])(i?B)?")
_POWER = re.compile(r"\d+(\.\d+)?[eE]\d{1,2}")


MAX_LISTED = 40  # characters of choices that help shows in place of a value


def integer(text: str) -> int:
    """Read a whole number, or one with a unit: 4k and 4KB are 4000, 4K and 4KiB 4096, 1.5g 1500000000, 1e3 1000.

    Raises ValueError.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None and not _POWER.fullmatch(text):
        return int(text)
    if match is None:
        size = float(text)
    else:
        unit = {None: match[2], "B": match[2].lower(), "iB": match[2].upper()}[match[3]]
        size = float(match[1]) * _UNITS[unit]
    if size != int(size):
        raise ValueError(text)
    return int(size)


def number(text: str) -> float:
    """Read a number, or a percentage: 90% is 0.9. Raises ValueError."""
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


def texts(value: str) -> list[str]:
    """Read the items of one argument of a list: a JSON list, or the argument itself. Raises ValueError."""
    if not value.startswith("["):
        return [value]
    try:
        return msgspec.json.decode(value, type=list[str])
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error


def rewritten(args: Sequence[str]) -> list[str]:
    """Arguments with flags as the parser knows them.

    --max_model_len is --max-model-len, -O3 is --optimization-level 3, and `--hf-overrides.rope_theta 1e6` is
    `--hf-overrides '{"rope_theta": 1e6}'`: dotted flags of one name make one JSON object.
    """
    found: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    words = iter(args)
    for word in words:
        flag, equals, value = word.partition("=")
        if re.fullmatch(r"-O\d", word):
            found += ["--optimization-level", word[2:]]
            continue
        if not flag.startswith("--"):
            found.append(word)
            continue
        name, *keys = flag.split(".")
        name = name.replace("_", "-")
        if keys:
            _put(objects.setdefault(name, {}), keys, value if equals else next(words, ""))
        else:
            found.append(name + equals + value)
    for name, values in objects.items():
        found += [name, msgspec.json.encode(values).decode()]
    return found


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Takes flags in all the spellings that `rewritten` knows."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args(rewritten(sys.argv[1:] if args is None else args), namespace)


def _put(values: dict[str, Any], keys: list[str], text: str) -> None:
    """Set an inner value of nested objects; text that is no JSON is itself."""
    for key in keys[:-1]:
        inner = values.get(key)
        values[key] = inner if isinstance(inner, dict) else {}
        values = values[key]
    try:
        values[keys[-1]] = msgspec.json.decode(text)
    except msgspec.DecodeError:
        values[keys[-1]] = text


def add_options(
    group: argparse._ActionsContainer,
    options: type,
    arguments: tuple[str, ...] = (),
    everything: bool = True,
    only: Collection[str] | None = None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> int:
    """Add a flag for each field of the dataclass `options`, and a positional for each of those in `arguments`.

    Unless `everything`, help shows only the fields marked as common. `only` names the fields to add, by default all.
    `defaults` replace the fields' own. Returns how many fields it hides.
    """
    hints = get_type_hints(options)
    hidden = 0
    for f in fields(options):
        if "help" not in f.metadata or (only is not None and f.name not in only):
            continue
        default = defaults.get(f.name, None if f.default is MISSING else f.default)
        by_device = f.name in DECIDED and f.name not in defaults
        others = "; GPUs have their own" if by_device else ""
        shown = "" if default in (None, "", ()) else f" (default: {default}{others})"
        text = (f.metadata["help"] + shown).replace("%", "%%")  # argparse formats help texts
        settings: dict[str, Any] = {"help": text, "default": None if by_device else default}
        if not everything and not f.metadata["common"]:
            settings["help"] = argparse.SUPPRESS
            hidden += 1
        settings.update(_reading(hints[f.name], f.metadata.get("aliases") or {}))
        flag = f"--{f.name.replace('_', '-')}"
        if f.name in arguments:
            group.add_argument(f.name, nargs="?", **{**settings, "metavar": f.name})
            if f.name == "model":  # vLLM's two ways to name it
                group.add_argument(flag, dest="model_flag", help=argparse.SUPPRESS)
        else:
            flags = [f.metadata["short"]] if f.metadata["short"] else []
            group.add_argument(*flags, flag, dest=f.name, **settings)
    return hidden


def lacks(parser: argparse.ArgumentParser, args: Sequence[str]) -> bool:
    """Tell whether `args` have a flag that the parser lacks."""
    flags = [word.partition("=")[0] for word in args if re.match("--?[A-Za-z]", word)]
    return not all(flag in parser._option_string_actions for flag in flags)


def add_unused(parser: argparse.ArgumentParser, sections: Iterable[type], names: Collection[str]) -> None:
    """Add the options `names` of some sections, without help. Their words end up under their names if given."""
    for f in (f for section in sections for f in fields(section) if "help" in f.metadata and f.name in names):
        flag = f.name.replace("_", "-")
        flags = [*filter(None, [f.metadata["short"]]), f"--{flag}", f"--no-{flag}"]
        parser.add_argument(*flags, dest=f.name, nargs="*", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def add_foreign(parser: argparse.ArgumentParser, table: Mapping[str, ForeignFlag]) -> None:
    """Add the flags that Quire knows but lacks, without help. Their values end up under their names if given."""
    for flag in table.values():
        name = "--" + flag.name.replace("_", "-")  # as `rewritten` gives it
        if name not in parser._option_string_actions:
            parser.add_argument(name, dest=flag.name, **_foreign_reading(flag))


def _foreign_reading(flag: ForeignFlag) -> dict[str, Any]:
    hidden = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    if flag.takes == "switch":
        return {**hidden, "action": argparse.BooleanOptionalAction}
    return {**hidden, "nargs": "*"} if flag.takes == "list" else hidden


def _reading(hint: Any, aliases: dict[str, Any]) -> dict[str, Any]:
    """Say how argparse reads a value of a field's type."""
    plain = [part for part in get_args(hint) if part is not type(None)]
    if get_origin(hint) is Literal:
        listed = "{" + ",".join(map(str, plain)) + "}"
        choices = {"choices": plain, "metavar": listed if len(listed) <= MAX_LISTED else "NAME"}
        return choices if not aliases else {**choices, "type": lambda text: aliases.get(text, text)}
    if get_origin(hint) is tuple:
        return {"action": Listed, "nargs": "+", "metavar": "VALUE"}
    if type(None) in get_args(hint):
        return _reading(plain[0], {"auto": None, **aliases} if plain[0] in (int, float) else aliases)
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if hint is int:
        return {"type": _or_alias(integer, aliases, "int"), "metavar": "INT"}
    if hint is float:
        return {"type": _or_alias(number, aliases, "float"), "metavar": "FLOAT"}
    return {"type": hint, "metavar": hint.__name__.upper()}


def _or_alias(read: Callable[[str], Any], aliases: dict[str, Any], name: str) -> Callable[[str], Any]:
    def reading(text: str) -> Any:
        return aliases[text] if text in aliases else read(text)

    reading.__name__ = name  # argparse names it in errors
    return reading


class Listed(argparse.Action):
    """Collects a list: several values, a repeated flag, or JSON. The first one given replaces the default."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        flag: str | None = None,
    ) -> None:
        seen = getattr(namespace, self.dest)
        try:
            new = [item for value in values for item in texts(value)]
        except ValueError as error:
            raise argparse.ArgumentError(self, f"{values} is not a JSON list of texts: {error}") from error
        setattr(namespace, self.dest, [*(seen if isinstance(seen, list) else ()), *new])
