"""`quire completion`: prints the script by which a shell completes commands, options and their values."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from quire.cli import COMMANDS, Command, Options, Program, load_command, make_parser
from quire.config import option
from quire.weights.hub import ASSETS

BASH = """_quire() {{
    local name="" found="" before="" last="" flag="" one count
    local word="${{COMP_WORDS[COMP_CWORD]}}"
    for count in 2 1; do
        if (( COMP_CWORD > count )) && [[ -z $name && "{all}" == *"|${{COMP_WORDS[*]:1:$count}}|"* ]]; then
            name="${{COMP_WORDS[*]:1:$count}}" last="$count"
        fi
    done
    (( COMP_CWORD > 1 )) && before="${{COMP_WORDS[COMP_CWORD-1]}}"
    [[ $before == "=" ]] && before="${{COMP_WORDS[COMP_CWORD-2]}}"
    [[ $word == "=" ]] && word=""
    [[ $word == --*=* ]] && before="${{word%%=*}}" flag="$before=" word="${{word#*=}}"
    case "$name $before" in
{choices}
    esac
    if [[ -z $found && $word == -* ]]; then
        case "$name" in
{options}
        esac
    elif [[ -z $found && $before != -* && "{readers}" == *"|$name|"* ]]; then
        found="{models}"
        for (( count = last + 1; count < COMP_CWORD; count++ )); do
            [[ ${{COMP_WORDS[count]}} == [-=]* || ${{COMP_WORDS[count-1]}} == [-=]* ]] || found=""
        done
    fi
    if [[ $found == "{models}" ]]; then
        for one in "${{HF_HUB_CACHE:-${{HF_HOME:-${{XDG_CACHE_HOME:-$HOME/.cache}}/huggingface}}/hub}}"/models--*/; do
            one="${{one%/}}" one="${{one##*/models--}}"
            [[ $one == "*" ]] || found="$found ${{one//--//}}"
        done
    fi
    COMPREPLY=( $(compgen -P "$flag" -W "$found" -- "$word") )
}}
complete -o default -F _quire quire
"""
ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
FISH = r"""function __quire_in
    set -l words (commandline -opc)
    contains -- "$words[2..3]" {pairs}; and test "$words[2..3]" = "$argv"; and return
    not contains -- "$words[2..3]" {pairs}; and test "$words[2]" = "$argv"
end
function __quire_no_model
    set -l before ""
    set -l words (commandline -opc)
    set -e words[1..$argv]
    for word in $words
        string match -qr -- '^-' $word $before; or return 1
        set before $word
    end
end
function __quire_models
    set -l hub ~/.cache/huggingface/hub
    set -q XDG_CACHE_HOME; and set hub $XDG_CACHE_HOME/huggingface/hub
    set -q HF_HOME; and set hub $HF_HOME/hub
    set -q HF_HUB_CACHE; and set hub $HF_HUB_CACHE
    printf '%s\n' {models}
    for place in $hub/models--*
        string replace -r '.*/models--' '' $place | string replace -a -- -- /
    end
end
"""
MODELS = ("model", "model_flag", "spec_model", "tokenizer", "base")  # options whose values are models
FIRST = list(dict.fromkeys(name.split()[0] for name in COMMANDS))

Shell = Literal["bash", "zsh", "fish"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOptions(Options):
    """Options of `quire completion`."""

    shell: Shell = option("bash", "The shell that reads the script.")


def run(options: CompletionOptions) -> None:
    made = {"bash": bash, "zsh": lambda: ZSH + bash(), "fish": fish}
    print(made[options.shell](), end="")


def flags(name: str) -> Iterator[tuple[str, argparse.Action]]:
    """Yield the long options of a command, each with its action."""
    for action in make_parser(name, load_command(name, Program()), Program(), True)._actions:
        if action.help != argparse.SUPPRESS or action.dest == "model_flag":
            yield from ((flag, action) for flag in action.option_strings if flag.startswith("--"))


def shipped() -> str:
    """List the models inside the package."""
    return " ".join(sorted(path.parent.name for path in ASSETS.glob("*/config.json")))


def reads_model(name: str) -> bool:
    """Return whether the command takes a model by position."""
    return not {"model", "text"}.isdisjoint(load_command(name, Program()).arguments)


def inner(group: str) -> str:
    """List the words that follow the first word of some commands."""
    return " ".join(name.split()[1] for name in COMMANDS if name.startswith(f"{group} "))


def bash() -> str:
    """Write the script for bash."""
    choices, options, models = [], [], shipped()
    for name in COMMANDS:
        found = list(flags(name))
        options.append(f'            "{name}") found="{" ".join(flag for flag, _ in found)}" ;;')
        values = {flag: " ".join(map(str, a.choices)) for flag, a in found if a.choices}
        values |= {flag: models for flag, action in found if action.dest in MODELS}
        choices += [f'        "{name} {flag}") found="{listed}" ;;' for flag, listed in values.items()]
    choices.append(f'        "completion completion") found="{" ".join(get_args(Shell))}" ;;')
    for group in FIRST:
        if words := inner(group):
            choices.append(f'        "{group} {group}"|" {group}") found="{words}" ;;')
    choices.append(f'        " help") found="{" ".join(FIRST)}" ;;')
    choices.append(f'        " ") found="{" ".join(FIRST)} help version --help --version" ;;')
    return BASH.format(
        all="|".join(["", *COMMANDS, ""]),
        readers="|".join(["", *filter(reads_model, COMMANDS), ""]),
        models=models,
        choices="\n".join(choices),
        options="\n".join(options),
    )


def fish() -> str:
    """Write the script for fish."""
    pairs = " ".join(_quoted(name) for name in COMMANDS if " " in name)
    lines = [FISH.replace("{pairs}", pairs).replace("{models}", shipped())]
    first = " ".join(FIRST)
    lines.append(f"complete -c quire -n __fish_use_subcommand -xa '{first} help version'\n")
    lines.append(f"complete -c quire -n '__quire_in help' -xa '{first}'\n")
    for name, entry in COMMANDS.items():
        *group, word = name.split()
        within = f"__quire_in {group[0]}" if group else "__fish_use_subcommand"
        lines.append(f"complete -c quire -n '{within}' -xa {word} -d {_quoted(entry.help)}\n")
        if reads_model(name):
            wanted = f"__quire_in {name}; and __quire_no_model {1 + len(name.split())}"
            lines.append(f"complete -c quire -n '{wanted}' -a '(__quire_models)'\n")
        for flag, action in flags(name):
            values = " -r" if action.nargs != 0 else ""
            if action.choices:
                values = f" -xa {_quoted(' '.join(map(str, action.choices)))}"
            elif action.dest in MODELS:
                values = " -ra '(__quire_models)'"
            text = _quoted((action.help or "").replace("%%", "%"))
            lines.append(f"complete -c quire -n '__quire_in {name}' -l {flag[2:]}{values} -d {text}\n")
    lines.append(f"complete -c quire -n '__quire_in completion' -xa '{' '.join(get_args(Shell))}'\n")
    return "".join(lines)


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


COMMAND = Command(run, CompletionOptions, arguments=("shell",), uses=frozenset())
