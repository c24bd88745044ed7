"""Every command with every option of the engine: it is used and shown, or refused by name."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from quire.cli import COMMANDS, Command, Program, load_command, main
from quire.flags.table import ENGINE_OPTIONS


def command_of(name: str) -> Command:
    return load_command(name, Program())


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def shown(capsys: pytest.CaptureFixture[str], name: str, how: str) -> set[str]:
    """The flags in a command's help, and its places."""
    with pytest.raises(SystemExit) as ended:
        main([*name.split(), how])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    return set(re.findall(r"^  (?:-\w+(?: \w+)?, |--\w+ \w+, )?(--[a-z0-9-]+|[a-z]+)", text, re.MULTILINE))


@pytest.mark.parametrize("name", COMMANDS)
def test_options_are_shown_or_refused_by_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = command_of(name)
    own = {f.name for f in fields(command.options)}
    assert command.uses <= ENGINE_OPTIONS
    everything = shown(capsys, name, "--help-all")
    for option in command.uses | own:
        assert {flag(option), option if option in command.arguments else flag(option)} & everything
    unused = ENGINE_OPTIONS - command.uses - own - command.foreign().keys()
    assert not {flag(option) for option in unused} & everything
    for option in sorted(unused):
        with pytest.raises(SystemExit) as ended:
            main([*name.split(), flag(option), "1"])
        said = capsys.readouterr()
        assert (ended.value.code, said.out) == (2, "")
        assert said.err == f"quire {name}: error: {name} does not use {flag(option)}: leave it out\n"


@pytest.mark.parametrize("name", ["convert", "inspect", "pull", "quantize"])
def test_help_shows_what_a_command_with_few_options_uses(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = shown(capsys, name, "--help")
    assert {flag(option) for option in command_of(name).uses - {"model"}} <= seen


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("quantize -tp 2", "quantize does not use --tensor-parallel-size: leave it out"),
        ("build --no-enable-prefix-caching", "build does not use --enable-prefix-caching: leave it out"),
        ("build --stream_interval=8", "build does not use --stream-interval: leave it out"),
        ("complete --hf-overrides.rope_theta 1", "complete does not use --hf-overrides: leave it out"),
        ("models --cudagraph-metrics", "there is no option --cudagraph-metrics\n"),
        ("chat --url http://127.0.0.1:1 --threads 2", "--threads means nothing here: leave it out"),
        ("chat --api-key x", "--api-key means nothing here: leave it out"),
    ],
)
def test_other_spellings_are_refused_likewise(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
