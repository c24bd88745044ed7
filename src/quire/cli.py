"""The `quire` command. Options come from dataclass fields; only the module of the chosen command is imported."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from quire import __version__
from quire.config import SECTIONS, EngineConfig
from quire.errors import QuireError


@dataclass(frozen=True, slots=True)
class Entry:
    """A command before its module is loaded."""

    module: str
    help: str


COMMANDS: dict[str, Entry] = {
    "serve": Entry("quire.commands.serve", "Serve a model over HTTP with OpenAI's API."),
    "chat": Entry("quire.commands.chat", "Talk to a model in the terminal."),
    "generate": Entry("quire.commands.generate", "Continue a text."),
    "plan": Entry("quire.commands.plan", "Show a model's memory and the speed that this machine allows."),
    "build": Entry(
        "quire.commands.build", "Pack a checkpoint for this machine into a directory that starts at once."
    ),
    "inspect": Entry("quire.commands.inspect", "Show and check a built directory."),
    "bench latency": Entry("quire.bench.latency", "Time one batch of requests from start to end."),
    "bench throughput": Entry("quire.bench.throughput", "Time many requests at once, offline."),
    "bench quality": Entry("quire.bench.quality", "Compare a quantized model with itself in float32."),
    "bench serve": Entry("quire.bench.serve", "Load a server and report latency and throughput."),
    "bench startup": Entry("quire.bench.startup", "Time from process start to the first token."),
}


@dataclass(frozen=True, slots=True)
class Command:
    """What a command's module offers as COMMAND: `run(engine, own)` or, with engine=False, `run(own)`.

    `options` is a frozen dataclass of the command's own options; `arguments` names fields taken by position.
    `read_config` makes `--config FILE` an option: what the file says become the defaults of the other options.
    """

    run: Callable[..., None]
    options: type
    arguments: tuple[str, ...] = ()
    engine: bool = True
    read_config: Callable[[str], dict[str, Any]] | None = None


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. Errors of Quire are printed as one line and exit with status 1; usage errors with 2."""
    args = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    try:
        for words in (2, 1):
            if entry := COMMANDS.get(" ".join(args[:words])):
                _run(" ".join(args[:words]), entry, args[words:])
                return
        _overview().parse_args(args or ["--help"])
    except QuireError as error:
        print(f"quire: error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _overview() -> argparse.ArgumentParser:
    """Lists the commands without loading any; refuses whatever is none of them."""
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:{width}}  {entry.help}" for name, entry in COMMANDS.items())
    parser = argparse.ArgumentParser(
        "quire",
        description="Quire serves large language models.",
        epilog=f"commands:\n{lines}\n\n`quire COMMAND --help` tells a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    return parser


def _run(name: str, entry: Entry, args: list[str]) -> None:
    """Load a command's module, read its options from `args`, and call it."""
    command: Command = importlib.import_module(entry.module).COMMAND
    parser = argparse.ArgumentParser(
        f"quire {name}",
        description=entry.help,
        allow_abbrev=False,
    )
    _add_options(parser.add_argument_group("options of this command"), command.options, command.arguments)
    if command.engine:
        for section, options in SECTIONS.items():
            _add_options(parser.add_argument_group(f"{section} options"), options, command.arguments)
        _add_options(parser, EngineConfig, (), only=("seed",))
    if command.read_config is not None:
        parser.add_argument("--config", help="YAML file of options; flags prevail over it")
        known, _ = parser.parse_known_args(args)
        if known.config is not None:
            parser.set_defaults(**command.read_config(known.config))
    values = vars(parser.parse_args(args))
    if command.read_config is not None:
        del values["config"]
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    own = command.options(**{f.name: values.pop(f.name) for f in fields(command.options)})
    if command.engine:
        command.run(EngineConfig.from_options(**values), own)
    else:
        command.run(own)


def _add_options(
    group: argparse._ActionsContainer, options: type, arguments: tuple[str, ...], only: tuple[str, ...] = ()
) -> None:
    """A flag for each field of the dataclass `options`; for those in `arguments` a place instead."""
    hints = get_type_hints(options)
    for f in fields(options):
        if only and f.name not in only:
            continue
        default = None if f.default is MISSING else f.default
        shown = "" if default in (None, "", ()) else f" (default: {default})"
        settings: dict[str, Any] = {"help": f.metadata["help"] + shown, "default": default}
        settings.update(_reading(hints[f.name]))
        if f.name in arguments:
            group.add_argument(f.name, nargs="?", **{**settings, "metavar": f.name})
        else:
            flags = [f.metadata["short"]] if f.metadata["short"] else []
            group.add_argument(*flags, f"--{f.name.replace('_', '-')}", **settings)


def _reading(hint: Any) -> dict[str, Any]:
    """How argparse reads a value of a field's type."""
    plain = [part for part in get_args(hint) if part is not type(None)]
    if get_origin(hint) is Literal:
        return {"choices": plain}
    if get_origin(hint) is tuple:
        return {"action": Repeated, "metavar": "VALUE"}
    if type(None) in get_args(hint):
        return _reading(plain[0])
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": hint, "metavar": hint.__name__.upper()}


class Repeated(argparse.Action):
    """Collects a repeatable flag; the first one given replaces the default."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        flag: str | None = None,
    ) -> None:
        seen = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*(seen if isinstance(seen, list) else ()), values])


if __name__ == "__main__":
    main()
