"""`quire completion`: prints the script by which a shell completes commands, options and their values."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from quire.cli import COMMANDS, Command, Program, load_command, make_parser
from quire.config import check_options, option

BASH = """_quire() {{
    local name="" word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" found=""
    for count in 2 1; do
        if (( COMP_CWORD > count )) && [[ -z $name && "{all}" == *"|${{COMP_WORDS[*]:1:count}}|"* ]]; then
            name="${{COMP_WORDS[*]:1:count}}"
        fi
    done
    case "$name $before" in
{choices}
    esac
    if [[ -z $found ]]; then
        case "$name|${{COMP_WORDS[*]:1:COMP_CWORD-1}}" in
{options}
        esac
        [[ -n $name && $word != -* ]] && found=""
    fi
    COMPREPLY=( $(compgen -W "$found" -- "$word") )
}}
complete -o default -F _quire quire
"""
ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
FISH = """function __quire_in
    set -l words (commandline -opc)
    test "$words[2..]" = "$argv"; or string match -q -- "$argv *" "$words[2..]"
end
"""


Shell = Literal["bash", "zsh", "fish"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOptions:
    """Options of `quire completion`."""

    shell: Shell = option("bash", "The shell that reads the script.")

    def __post_init__(self) -> None:
        check_options(self)


def run(options: CompletionOptions) -> None:
    made = {"bash": bash, "zsh": lambda: ZSH + bash(), "fish": fish}
    print(made[options.shell](), end="")


def flags(name: str) -> Iterator[tuple[str, argparse.Action]]:
    """Yield the long options of a command, each with its action."""
    for action in make_parser(name, load_command(name, Program()), Program(), True)._actions:
        if action.help != argparse.SUPPRESS:
            yield from ((flag, action) for flag in action.option_strings if flag.startswith("--"))


def bash() -> str:
    """Write the script for bash."""
    choices, options = [], []
    for name in COMMANDS:
        found = list(flags(name))
        options.append(f'            "{name}|"*) found="{" ".join(flag for flag, _ in found)}" ;;')
        choices += [
            f'        "{name} {flag}") found="{" ".join(map(str, action.choices))}" ;;'
            for flag, action in found
            if action.choices
        ]
    choices.append(f'        "completion completion") found="{" ".join(get_args(Shell))}" ;;')
    for group in dict.fromkeys(name.split()[0] for name in COMMANDS if " " in name):
        inner = " ".join(name.split()[1] for name in COMMANDS if name.startswith(f"{group} "))
        choices.append(f'        "{group} {group}"|" {group}") found="{inner}" ;;')
    first = " ".join(dict.fromkeys(name.split()[0] for name in COMMANDS))
    options.append(f'            "|") found="{first} --help --version" ;;')
    names = "|".join(["", *COMMANDS, ""])
    return BASH.format(all=names, choices="\n".join(choices), options="\n".join(options))


def fish() -> str:
    """Write the script for fish."""
    lines = [FISH]
    for name, entry in COMMANDS.items():
        *group, word = name.split()
        within = " ".join(["__quire_in", *group]) if group else "__fish_use_subcommand"
        lines.append(f"complete -c quire -n '{within}' -a {word} -d {_quoted(entry.help)}\n")
        for flag, action in flags(name):
            values = f" -xa {_quoted(' '.join(map(str, action.choices)))}" if action.choices else ""
            text = _quoted((action.help or "").replace("%%", "%"))
            lines.append(f"complete -c quire -n '__quire_in {name}' -l {flag[2:]}{values} -d {text}\n")
    return "".join(lines)


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


COMMAND = Command(run, CompletionOptions, arguments=("shell",), uses=frozenset())
