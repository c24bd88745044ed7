"""The `quire` command. Options come from dataclass fields; only the module of the chosen command is imported."""

from __future__ import annotations

import argparse
import functools
import importlib
import logging
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_type_hints

from quire import __version__
from quire.config import SECTIONS, EngineConfig, check_options
from quire.errors import ConfigError, QuireError
from quire.flags.arguments import add_options, add_unused, lacks, rewritten
from quire.flags.table import ENGINE_OPTIONS, ForeignFlag, Table, engine_flags, take_foreign
from quire.lazy import Lazy

if TYPE_CHECKING:
    from quire import exits, meter, spelling
    from quire.flags import config_file, dialects, words
else:
    dialects = Lazy("quire.flags.dialects")
    exits, spelling = Lazy("quire.exits"), Lazy("quire.spelling")
    config_file, meter = Lazy("quire.flags.config_file"), Lazy("quire.meter")
    words = Lazy("quire.flags.words")

log = logging.getLogger("quire")

PARTS: dict[str, type] = {**SECTIONS, "other": EngineConfig}
MOST_SHOWN = 20  # options of the engine that `--help` shows in full


@dataclass(frozen=True, slots=True)
class Entry:
    """A command before its module is loaded, which has it under the name `attribute`."""

    module: str
    help: str
    attribute: str = "COMMAND"


COMMANDS: dict[str, Entry] = {
    "serve": Entry("quire.commands.serve", "Serve a model over HTTP with OpenAI's API."),
    "route": Entry("quire.commands.route", "Serve many replicas at one address."),
    "chat": Entry("quire.commands.chat", "Talk to a model in the terminal."),
    "generate": Entry("quire.commands.generate", "Continue a text."),
    "complete": Entry("quire.commands.complete", "Continue texts through a running server."),
    "plan": Entry("quire.commands.plan", "Show a model's memory and the speed that this machine allows."),
    "build": Entry(
        "quire.commands.build", "Pack a checkpoint for this machine into a directory that starts at once."
    ),
    "convert": Entry("quire.commands.convert", "Divide a checkpoint among ranks, for builds on any machine."),
    "quantize": Entry("quire.commands.quantize", "Make a smaller checkpoint, calibrated on a text."),
    "inspect": Entry("quire.commands.inspect", "Show how Quire describes a model; check a built engine."),
    "pull": Entry("quire.commands.pull", "Fetch a model of the hub."),
    "models": Entry("quire.commands.models", "List the models on this machine."),
    "models where": Entry("quire.commands.models", "Print where a model is.", "WHERE"),
    "models rm": Entry("quire.commands.models", "Remove a model from the cache.", "REMOVE"),
    "ps": Entry("quire.commands.ps", "List the servers of this user."),
    "doctor": Entry("quire.commands.doctor", "Say what this machine offers, and what to change."),
    "docs": Entry("quire.commands.docs", "Read the docs here, without a network."),
    "kernels": Entry("quire.commands.kernels", "Compile the kernels of GPUs, and list what each takes."),
    "completion": Entry("quire.commands.completion", "Print the script by which a shell completes commands."),
    "bench latency": Entry("quire.bench.latency", "Time one batch of requests from start to end."),
    "bench throughput": Entry("quire.bench.throughput", "Time many requests at once, offline."),
    "bench quality": Entry("quire.bench.quality", "Compare a quantized model with itself in float32."),
    "bench serve": Entry("quire.bench.serve", "Load a server and report latency and throughput."),
    "bench startup": Entry("quire.bench.startup", "Time from process start to the first token."),
    "bench host": Entry("quire.bench.host", "Time what a step costs on the host, without a device."),
}

SYNONYMS = {
    "run": "chat",
    "list": "models",
    "ls": "models",
    "show": "inspect",
    **dict.fromkeys(("rm", "remove", "delete"), "models rm"),
    **dict.fromkeys(("stop", "status"), "ps"),
    "info": "inspect",
    "perplexity": "bench quality",
    "download": "pull",
    "collect-env": "doctor",
}
"""SYNONYMS are the words of other programs for commands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a command. ConfigError: a value is out of its range."""

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class Command:
    """A command, as its module exports it under COMMAND: `run(engine, own)`, or `run(own)` if it `uses` nothing.

    `options` is a frozen dataclass of the command's own options; `arguments` names the fields taken by position.
    `uses` names the engine's options that mean something to it (flags/uses.py): help shows them, others are refused.
    `idle` names the options that the command's own leave without a meaning. `told_files` commands get the files that
    options were read from as their last argument. Without `reads_user_file` a command works if that file is broken.
    `foreign` reads the flags of another engine's command that this one lacks.
    """

    run: Callable[..., None]
    options: type
    arguments: tuple[str, ...] = ()
    uses: frozenset[str] = ENGINE_OPTIONS
    idle: Callable[[Any], Collection[str]] = lambda own: ()
    told_files: bool = False
    reads_user_file: bool = True
    foreign: Table = dict

    @property
    def own_names(self) -> frozenset[str]:
        """Names of the command's own options."""
        return frozenset(f.name for f in fields(self.options))

    def foreign_flags(self) -> Mapping[str, ForeignFlag]:
        """Read the flags of other engines that the command takes."""
        return {**(engine_flags() if self.uses else {}), **self.foreign()}


@dataclass(frozen=True, slots=True)
class Program:
    """A program's name, its commands, and the defaults of options that differ from Quire's, by command.

    A command without a name is the program itself.
    """

    name: str = "quire"
    commands: Mapping[str, Entry] = field(default_factory=lambda: COMMANDS)
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def single(cls, name: str, module: str, help: str) -> Program:
        """Make a program with one command, the one in `module`."""
        return cls(name, {"": Entry(module, help)})


def main(argv: Sequence[str] | None = None, program: Program | None = None) -> None:
    """Entry point. Prints an error as one line and exits with status 1, or 2 if options are at fault."""
    open_closed_streams()
    program = program or Program()
    args = list(sys.argv[1:] if argv is None else argv)
    report_errors(lambda: _dispatch(args, program), program.name, args)


def report_errors(work: Callable[[], None], name: str, args: Sequence[str]) -> None:
    """Call `work`; print the errors of the program `name` as one line and exit. `args` say whether the line is JSON."""
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    if not meter.draws():
        meter.log.setLevel(logging.INFO)
    try:
        try:
            work()
            ignore_interrupts()
        finally:
            sys.stdout.flush()
    except (QuireError, OSError, MemoryError) as error:
        prog = error.prog if isinstance(error, UsageError) else name
        raise SystemExit(exits.report(error, prog, args)) from None
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich reads it as an end
            raise SystemExit(exits.CLOSED_PIPE) from None
        raise
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        ignore_interrupts()


def open_closed_streams() -> None:
    """Open what the caller closed (`>&-`), so that no other file takes its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def ignore_interrupts() -> None:
    """Ignore Ctrl-C from now on: a command whose work is done keeps its exit status.

    The interpreter takes a while to free a model, and an interrupt meanwhile would end the process by its signal.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _dispatch(args: list[str], program: Program) -> None:
    for words in (2, 1, 0):
        if " ".join(args[:words]) in program.commands:
            _run(" ".join(args[:words]), args[words:], program)
            return
    if args[:1] == ["help"]:
        args = [*args[1:], "--help"]
        return _dispatch(args, program)
    _overview(args, program)


class UsageError(ConfigError):
    """Arguments that the parser of `prog` does not take."""

    def __init__(self, prog: str, message: str) -> None:
        super().__init__(message)
        self.prog = prog


class Parser(argparse.ArgumentParser):
    """Reports a usage error in one line, with the nearest option that exists."""

    advice = ""  # where a text that is one too many may belong
    unused: Collection[str] = ()  # engine options that the command does not use

    def error(self, message: str) -> NoReturn:
        # -hf is read as -h f.
        joined = re.match("argument (-[a-z]).*: ignored explicit argument '(.*)'", message)
        if joined and (hint := words.advice(joined[1] + joined[2], self._option_string_actions)):
            message = f"there is no option {joined[1]}{joined[2]}{hint}"
        wrong = re.match("argument --dtype: invalid choice: '(.*?)'", message)
        action = self._option_string_actions.get("--quantization")
        if wrong and action is not None and wrong[1] in (action.choices or ()):
            message = f"--dtype {wrong[1]} is a quantization: give --quantization {wrong[1]}"
        raise UsageError(self.prog, message)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        options = self._option_string_actions
        known = [flag for flag, action in options.items() if action.dest not in self.unused]
        shown = [flag for flag in known if options[flag].default is not argparse.SUPPRESS]
        for word in unknown:
            name = word.partition("=")[0]
            if word.startswith("--") or re.fullmatch("-[A-Za-z]+", name):
                hint = (
                    words.advice(name, known)
                    or spelling.nearest(name, shown)
                    or spelling.nearest(name, known)
                )
                self.error(f"there is no option {name}{hint}")
        if unknown:
            self.error(f"{unknown[0]!r} is one argument too many{self.advice}")
        return found

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Take `-oDIR` for `-o DIR`, but `-p` for nothing longer."""
        return [
            found for found in super()._get_option_tuples(option_string) if option_string.startswith(found[1])
        ]


def _overview(args: list[str], program: Program) -> None:
    """List all commands, or a group's, without loading any; refuse anything else."""
    name, commands = program.name, program.commands
    group = args[0] if args and any(command.startswith(f"{args[0]} ") for command in commands) else ""
    rest = args[1:] if group else args
    parser = Parser(name, add_help=False)
    if rest and rest[0] in ("--version", "-V", "version"):
        print(f"quire {__version__}")
    elif not rest or rest[0] in ("-h", "--help", "--help-all"):
        shown = {n: entry for n, entry in commands.items() if not group or n.startswith(f"{group} ")}
        width = max(map(len, shown))
        columns = shutil.get_terminal_size().columns
        lines = "\n".join(
            textwrap.fill(
                entry.help,
                columns,
                initial_indent=f"  {command:{width}}  ",
                subsequent_indent=" " * (width + 4),
            )
            for command, entry in shown.items()
        )
        more = f"`{name} COMMAND --help` shows the common options of a command, `--help-all` all of them."
        print(f"usage: {name} {f'{group} ' if group else ''}COMMAND [options]\n\n{lines}\n")
        print(textwrap.fill(more, columns))
    else:
        word = f"{group} {rest[0]}".strip()
        known = [*commands, *{command.split()[0] for command in commands}]
        meant = SYNONYMS.get(word)
        hint = f": it is `{name} {meant}`" if meant in commands else spelling.nearest(word, known)
        parser.error(f"there is no command {word!r}{hint}")


def load_command(name: str, program: Program) -> Command:
    """Import a command's module."""
    entry = program.commands[name]
    command: Command = getattr(importlib.import_module(entry.module), entry.attribute)
    return command


def make_parser(name: str, command: Command, program: Program, everything: bool) -> Parser:
    """Make a command's parser. Unless `everything`, its help shows the common options only."""
    defaults = program.defaults.get(name, {})
    places = "".join(f" [{argument}]" for argument in command.arguments)
    called = f"{program.name} {name}".rstrip()
    parser = Parser(
        called,
        usage=f"{called}{places} [options]",
        description=program.commands[name].help,
        allow_abbrev=False,
    )
    if command.uses and "model" not in command.arguments:
        parser.advice = "; --model names the model"
    parser.add_argument("--help-all", action="help", help="show every option and exit")
    own_options = parser.add_argument_group("options of this command")
    show_own = everything or not any(f.metadata["common"] for f in fields(command.options))
    hidden = add_options(own_options, command.options, command.arguments, show_own, defaults=defaults)
    every_used = everything or len(command.uses) <= MOST_SHOWN
    for section, options in PARTS.items():
        group = parser.add_argument_group(f"{section} options")
        hidden += add_options(group, options, command.arguments, every_used, command.uses, defaults)
    if "--config" not in parser._option_string_actions:
        parser.add_argument("--config", help="YAML file of options; flags override it")
    if hidden:
        parser.epilog = f"{hidden} more options: {called} --help-all"
    return parser


def _run(name: str, args: list[str], program: Program) -> None:
    """Load a command's module, read its options from files and `args`, and call it."""
    command = load_command(name, program)
    args = rewritten(args)
    parser = make_parser(name, command, program, "--help-all" in args)

    taken = command.own_names | command.uses
    if lacks(parser, args):
        parser.unused = ENGINE_OPTIONS - taken - command.foreign_flags().keys()
        add_unused(parser, PARTS.values(), parser.unused)
    added = dialects.add_dialects(parser, args, command.foreign_flags) if lacks(parser, args) else []
    mine = config_file.user_file() if command.reads_user_file else None
    known = functools.partial(_known_options, name, command, program)
    given = config_file.read_files(parser, args, known, program.commands, mine)
    parser.set_defaults(**given.options)
    values = vars(parser.parse_args(args))
    if "config" not in command.own_names:
        del values["config"]
    elif values["config"] and Path(values["config"]) in given.files:
        values["config"] = ""
    try:
        notices = [notice for one in added for notice in dialects.take_dialect(one, values)]
        _choose_model(parser, values)
        for option in values.keys() & parser.unused:
            parser.error(f"{name or program.name} does not use {_flag(option)}: leave it out")
        for notice in (*notices, *take_foreign(values, taken, command.foreign_flags)):
            log.warning("%s", notice)
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        own = command.options(**{f.name: values.pop(f.name) for f in fields(command.options)})
        idle = {option: values.get(option, getattr(own, option, None)) for option in command.idle(own)}
        for option in sorted(o for o, value in idle.items() if value != parser.get_default(o)):
            parser.error(f"{_flag(option)} means nothing here: leave it out")
        for f in fields(own):
            if f.metadata["writes"] and getattr(own, f.name):
                exits.check_place(f.name, Path(getattr(own, f.name)), f.metadata["writes"] == "file")
        engine = (EngineConfig.from_options(**values),) if command.uses else ()
        command.run(*engine, own, *((given.files,) if command.told_files else ()))
    except ConfigError as error:
        given.explain(error)
        raise


def _known_options(name: str, command: Command, program: Program) -> config_file.Known:
    """Collect the options that a file may hold for a command."""
    hints: dict[str, Any] = {}
    for part in (EngineConfig, *SECTIONS.values()):
        hints |= get_type_hints(part)
    types = {option: hints[option] for option in command.uses} | get_type_hints(command.options)
    parts = (*PARTS.values(), command.options)
    replaced = {f.name: f.metadata["replaces"] for part in parts for f in fields(part) if f.metadata}
    return config_file.Known(
        command=name,
        engine=bool(command.uses),
        types=types,
        replaced=replaced | {"model_flag": ("model",)},
        foreign=command.foreign_flags,
        everywhere=functools.partial(all_options, program),
    )


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def all_options(program: Program) -> frozenset[str]:
    """Name the options of every command, other engines' flags too. Loads the commands."""
    own = frozenset[str]().union(*(load_command(name, program).own_names for name in program.commands))
    return own | ENGINE_OPTIONS | engine_flags().keys()


def _choose_model(parser: Parser, values: dict[str, Any]) -> None:
    """The model by position or by --model, not both."""
    flag = values.pop("model_flag", None)
    if flag is not None:
        if values["model"] not in ("", flag):
            parser.error(f"the model is given twice, as {values['model']!r} and as --model {flag!r}")
        values["model"] = flag


if __name__ == "__main__":
    main()
