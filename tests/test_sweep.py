"""Every command with wrong values, and places and pipes that cannot be used: one line and a status, no traceback."""

from __future__ import annotations

import importlib
import importlib.util
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from quire.cli import COMMANDS, Command, main
from quire.config import SECTIONS
from quire.quantize.fisher import fisher_information

ENGINE_COMMANDS = [
    name for name, entry in COMMANDS.items() if name not in ("complete", "inspect", "bench serve")
]


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """A command ends by ignoring Ctrl-C, which the test's process wants back."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def command_of(name: str) -> Command:
    found: Command = importlib.import_module(COMMANDS[name].module).COMMAND
    return found


def wrong_values(options: type, field: Field[Any]) -> Iterator[str]:
    """Values that the option's type or range excludes."""
    hint = get_type_hints(options)[field.name]
    kinds = {hint, *get_args(hint)}
    if get_origin(hint) is Literal:
        yield "nonsense"
    if kinds & {int, float} and str not in kinds:
        yield from ("x", "")
        for bound, step in ((field.metadata["low"], -1), (field.metadata["high"], 1)):
            if bound is not None:
                yield str(type(bound)(bound) + step)
    if float in kinds and str not in kinds:
        yield "nan"


def assert_refused(capsys: pytest.CaptureFixture[str], status: int, *args: str) -> str:
    """The one line that a command ends with."""
    with pytest.raises(SystemExit) as ended:
        main(args)
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (status, ""), (args, said)
    assert said.err.count("\n") == 1, (args, said.err)
    return said.err


@pytest.mark.parametrize("name", [*COMMANDS, "engine"])
def test_wrong_values_are_refused_by_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Options of the engine are the same for all its commands: one stands for them."""
    command = name if name in COMMANDS else "generate"
    parts = [command_of(name).options] if name in COMMANDS else list(SECTIONS.values())
    for options in parts:
        for field in fields(options):
            for value in wrong_values(options, field):
                flag = f"--{field.name.replace('_', '-')}"
                assert flag in assert_refused(capsys, 2, *command.split(), f"{flag}={value}")


@pytest.mark.parametrize("name", COMMANDS)
def test_places_that_cannot_be_written_are_found_first(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for field in fields(command_of(name).options):
        if field.metadata["writes"]:
            flag = f"--{field.name.replace('_', '-')}"
            for place in (tmp_path / "file" / "below", Path("/proc/quire/x")):
                said = assert_refused(capsys, 2, *name.split(), flag, str(place))
                assert f"{flag} {place}" in said
                assert "choose a place that can be written" in said


@pytest.mark.parametrize("name", ENGINE_COMMANDS)
def test_a_model_that_is_not_there(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text"
    text.write_text("Once upon a time. " * 50)
    needed = {"bench quality": ["--text", str(text)]}.get(name, [])
    if any(field.name == "output" for field in fields(command_of(name).options)):
        needed = ["-o", str(tmp_path / "out")]
    if name == "generate":
        needed = ["Once"]
    said = assert_refused(capsys, 1, *name.split(), *needed, "--model", str(tmp_path / "none"))
    assert "none" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("redirection", "status"),
    [("| true", 141), (">/dev/full", 1), (">&-", 0), ("2>&-", 0), ("<&-", 0)],
)
@pytest.mark.parametrize("command", ["--help", "plan", "generate Once --max-tokens 3"])
def test_closed_outputs(command: str, redirection: str, status: int) -> None:
    line = f"set -o pipefail; run() {{ {sys.executable} -m quire.cli {command}; }}; run {redirection}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)
    assert done.returncode in {status, 0 if status == 141 else status}, (
        done.stderr
    )  # a late reader got it all
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.stderr.count("\n") == (status == 1)


def test_missing_extras_name_the_line_that_installs_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for args, packages in (
        (("generate", "Once", "--backend", "torch"), "torch"),
        (("generate", "Once", "--model-impl", "transformers"), "torch transformers"),
        (("bench", "serve", "--plot", str(tmp_path / "plot.png")), "matplotlib"),
    ):
        assert f"pip install {packages}\n" in assert_refused(capsys, 2, *args)
    with pytest.raises(Exception, match="pip install torch transformers"):
        fisher_information(tmp_path, None, tmp_path)  # type: ignore[arg-type]
