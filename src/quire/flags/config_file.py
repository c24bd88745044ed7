"""Options in YAML files: the user's own, and the one that --config names."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_origin

import msgspec

from quire.errors import ConfigError
from quire.flags.table import Table
from quire.lazy import Lazy

if TYPE_CHECKING:
    import yaml

    from quire import spelling
else:
    yaml, spelling = Lazy("yaml"), Lazy("quire.spelling")

OTHER_MEANING = ("model", "backend")
"""OTHER_MEANING are options of an engine whose names mean something else to commands that start none."""


def user_file() -> Path | None:
    """Find the user's file, quire.yaml in $XDG_CONFIG_HOME or ~/.config; None: there is none."""
    given = os.environ.get("XDG_CONFIG_HOME", "")
    path = os.path.join(given if os.path.isabs(given) else os.path.expanduser("~/.config"), "quire.yaml")
    return Path(path) if os.path.isabs(path) and os.path.lexists(path) else None


@dataclass(frozen=True, slots=True)
class Known:
    """The options that a command has, with their types; other engines' flags; the options of all commands.

    An option takes the place of those under its name in `replaced`.
    """

    command: str
    engine: bool
    types: Mapping[str, Any]
    replaced: Mapping[str, Collection[str]]
    foreign: Table
    everywhere: Callable[[], Collection[str]]


@dataclass(frozen=True, slots=True)
class OptionsFile:
    """Options of a file: plain ones, and those in sections, each named after the command that it is for.

    Plain options in the user's own file are for all commands that have them.
    """

    path: Path
    own: bool
    plain: Mapping[str, Any]
    sections: Mapping[str, Mapping[str, Any]]

    @classmethod
    def read(cls, path: Path, own: bool, commands: Collection[str]) -> OptionsFile:
        """Read a file. ConfigError: it cannot be read, is no map, or has an option twice."""
        called = _called(path, own)
        try:
            loaded = yaml.safe_load(path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise ConfigError(f"{called} cannot be read: {' '.join(str(error).split())}") from error
        plain = _by_name(loaded, called)
        found = {key: key.replace("_", " ") for key in plain}
        sections = {
            name: _by_name(plain.pop(key), f"{called}: {name}")
            for key, name in found.items()
            if name in commands
        }
        return cls(path, own, plain, sections)

    def layers(self, known: Known, actions: Mapping[str, argparse.Action]) -> Iterator[dict[str, Any]]:
        """Yield the plain options of a command and those of its section, in their types. ConfigError: one is wrong."""
        file = _called(self.path, self.own)
        yield _typed(file, self.plain, known, actions, self.own)
        if known.command in self.sections:
            yield _typed(f"{file}: {known.command}", self.sections[known.command], known, actions, False)


@dataclass(frozen=True, slots=True)
class Given:
    """The options that files give to a command, with the file of each, and the files in the order of reading."""

    options: dict[str, Any]
    origins: dict[str, Path]
    files: tuple[Path, ...]

    def explain(self, error: ConfigError) -> None:
        """Add to an error about an option the file that gives it."""
        text = str(error)
        names = [name.replace("-", "_") for name in re.findall(r"--([a-z][a-z0-9-]+)", text)]
        places = [self.origins[name] for name in names if name in self.origins]
        if places:
            error.args = (f"{text} ({places[0]} sets it)", *error.args[1:])


def read_files(
    parser: argparse.ArgumentParser,
    args: Sequence[str],
    known_options: Callable[[], Known],
    commands: Collection[str],
    mine: Path | None,
) -> Given:
    """Read the options in the user's file, `mine`, and in --config's, but those in whose place `args` have others."""
    unset = object()
    if mine is None and not any(word.partition("=")[0] == "--config" for word in args):
        return Given({}, {}, ())
    known, actions = known_options(), {action.dest: action for action in parser._actions}
    plain = [word for word in args if word not in ("-h", "--help", "--help-all")]
    parsed, _ = parser.parse_known_args(plain, argparse.Namespace(**dict.fromkeys(actions, unset)))
    typed = {name: value for name, value in vars(parsed).items() if value is not unset}
    for name in [name for name in typed if name in actions and not actions[name].option_strings]:
        if typed[name] == actions[name].default:  # argparse sets a positional that is not there
            del typed[name]
    named = typed.get("config") or ""
    paths = [(mine, True)] if mine else []
    if named and ("config" not in known.types or named.endswith((".yaml", ".yml"))):
        paths.append((Path(named), False))
    options: dict[str, Any] = {}
    origins: dict[str, Path] = {}
    for path, own in paths:
        for layer in OptionsFile.read(path, own, commands).layers(known, actions):
            _drop(options, layer, known)
            options.update(layer)
            origins.update(dict.fromkeys(layer, path))
    _drop(options, typed, known)
    return Given(options, origins, tuple(path for path, _ in paths))


def _drop(options: dict[str, Any], given: Collection[str], known: Known) -> None:
    """Drop the options whose place those `given` take."""
    for name in given:
        for other in (name, *known.replaced.get(name, ())):
            options.pop(other, None)


def _called(path: Path, own: bool) -> str:
    return str(path) if own else f"--config {str(path)!r}"


def _by_name(values: Any, called: str) -> dict[str, Any]:
    """Read the options in a map by field name; keys may be written as flags (`max-model-len`)."""
    if not isinstance(values, dict | None):
        raise ConfigError(f"{called} must hold a map from option to value")
    found: dict[str, Any] = {}
    for key, value in (values or {}).items():
        name = "yes" if key is True else str(key).replace("-", "_")  # YAML's yes is a bool
        name = "model" if name == "model_tag" else name
        if name in found:
            raise ConfigError(f"{called}: option {key!r} is given twice")
        found[name] = value
    return found


def _typed(
    called: str, values: Mapping[str, Any], known: Known, actions: Mapping[str, argparse.Action], shared: bool
) -> dict[str, Any]:
    """Convert the options that a command has. `shared` ones may be other commands'."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if shared and not known.engine and name in OTHER_MEANING:
            continue
        if name in known.types:
            found[name] = converted(value, known.types[name], actions[name].type, f"{called}: {name}")
        elif name in known.foreign():
            found[name] = value
        elif name not in known.everywhere():
            near = spelling.nearest(name, known.everywhere() if shared else known.types)
            raise ConfigError(f"{called}: unknown option {name!r}{near}")
        elif not shared:
            raise ConfigError(f"{called}: {known.command} does not use {name}: leave it out")
    return found


def converted(value: Any, hint: Any, read: Any, called: str) -> Any:
    """Convert `value` to the type of a field, whose text `read` reads.

    A repeatable option takes a list or one value, and numbers as text.
    """
    if get_origin(hint) is tuple:
        items = value if isinstance(value, list) else [value]
        value = [str(item) if type(item) in (int, float) else item for item in items]
    if isinstance(value, str) and callable(read) and not value.isdigit():
        with suppress(ValueError):  # told below, with the type
            value = read(value)
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{called}: {error}") from error
