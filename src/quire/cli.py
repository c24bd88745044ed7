"""The `quire` command. Options come from dataclass fields; only the module of the chosen command is imported."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Annotated, Any, get_type_hints

import typer

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
    "bench latency": Entry("quire.bench.latency", "Time one batch of requests from start to end."),
    "bench throughput": Entry("quire.bench.throughput", "Time many requests at once, offline."),
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
        chosen = _chosen(args)
        _build(chosen, args)(args)
    except QuireError as error:
        print(f"quire: error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _chosen(args: Sequence[str]) -> str | None:
    for words in (2, 1):
        name = " ".join(args[:words])
        if name in COMMANDS:
            return name
    return None


def _build(chosen: str | None, args: Sequence[str]) -> Callable[..., Any]:
    """A Typer app that lists every command but has loaded the chosen one only."""
    app = typer.Typer(add_completion=False, no_args_is_help=True, help="Quire serves large language models.")
    groups: dict[str, typer.Typer] = {}
    for name, entry in COMMANDS.items():
        *group, verb = name.split()
        target = app
        if group:
            if group[0] not in groups:
                groups[group[0]] = typer.Typer(no_args_is_help=True)
                app.add_typer(groups[group[0]], name=group[0], help="Measure, beside the machine's limits.")
            target = groups[group[0]]
        target.command(verb, help=entry.help)(_load(entry, args) if name == chosen else _not_loaded)
    return app


def _not_loaded() -> None:
    """Stands in the list of commands for one that was not chosen."""


def _load(entry: Entry, args: Sequence[str]) -> Callable[..., None]:
    command: Command = importlib.import_module(entry.module).COMMAND
    path = _config_path(args) if command.read_config is not None else None
    defaults = command.read_config(path) if command.read_config is not None and path is not None else {}
    return _typed(command, defaults)


def _config_path(args: Sequence[str]) -> str | None:
    """The file that --config names; Typer sees the option too, and checks its form."""
    for i, arg in enumerate(args):
        if arg == "--config" and i + 1 < len(args):
            return args[i + 1]
        if arg.startswith("--config="):
            return arg.partition("=")[2]
    return None


def _typed(command: Command, defaults: dict[str, Any]) -> Callable[..., None]:
    """`command.run` behind a signature that Typer reads: its own options first, then the engine's."""
    own = [f.name for f in fields(command.options)]
    parameters = _parameters(command.options, command.arguments)
    if command.engine:
        for section in SECTIONS.values():
            parameters += _parameters(section, command.arguments)
        parameters += _parameters(EngineConfig, (), only=("seed",))
    if command.read_config is not None:
        parameters.append(_option("config", str | None, None, "YAML file of options; flags prevail over it."))
    parameters = [p.replace(default=defaults.get(p.name, p.default)) for p in parameters]
    parameters.sort(key=lambda p: p.kind)

    def call(**values: Any) -> None:
        values.pop("config", None)
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        options = command.options(**{name: values.pop(name) for name in own})
        if command.engine:
            command.run(EngineConfig.from_options(**values), options)
        else:
            command.run(options)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    return call


def _parameters(
    options: type, arguments: tuple[str, ...], only: tuple[str, ...] | None = None
) -> list[inspect.Parameter]:
    hints = get_type_hints(options)
    return [
        _parameter(f, hints[f.name], f.name in arguments)
        for f in fields(options)
        if only is None or f.name in only
    ]


def _parameter(f: Field[Any], hint: Any, positional: bool) -> inspect.Parameter:
    help = f.metadata.get("help", "")
    default = f.default if f.default is not MISSING else inspect.Parameter.empty
    if hint == tuple[str, ...]:  # Typer takes repeatable options as lists
        hint = list[str]
    if positional:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        annotation = Annotated[hint, typer.Argument(help=help)]
        return inspect.Parameter(f.name, kind, default=default, annotation=annotation)
    return _option(f.name, hint, default, help)


def _option(name: str, hint: Any, default: Any, help: str) -> inspect.Parameter:
    annotation = Annotated[hint, typer.Option(help=help)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


if __name__ == "__main__":
    main()
