"""`quire completion`: bash itself completes by the script; zsh and fish read it, where they are installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from quire.cli import COMMANDS
from tests.hub_server import quire


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bash") / "quire.bash"
    path.write_text(quire("completion", "bash").stdout)
    return path


def completed(script: Path, line: str) -> set[str]:
    """What bash offers for the last word of `line`."""
    words = line.split(" ")
    array = " ".join(f"'{word}'" for word in words)
    code = (
        f"source {script}; COMP_WORDS=({array}); COMP_CWORD={len(words) - 1}; _quire; echo ${{COMPREPLY[@]}}"
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("quire ser", {"serve"}),
        ("quire bench st", {"startup"}),
        ("quire bench ", {"latency", "throughput", "quality", "serve", "startup"}),
        ("quire models w", {"where"}),
        ("quire serve --por", {"--port"}),
        ("quire serve some/model --api-key-f", {"--api-key-file"}),
        ("quire bench serve --num-pro", {"--num-prompts"}),
        ("quire chat --reasoning ", {"show", "hide"}),
        ("quire serve --log-format j", {"json"}),
        ("quire completion f", {"fish"}),
        ("quire serve --config ", set()),
    ],
)
def test_bash_completes(script: Path, line: str, offered: set[str]) -> None:
    assert completed(script, line) == offered


def test_every_command_is_offered(script: Path) -> None:
    assert completed(script, "quire ") >= {name.split()[0] for name in COMMANDS}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_reads_the_script(shell: str, tmp_path: Path) -> None:
    done = quire("completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--api-key-file" in done.stdout or "-l api-key-file" in done.stdout
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(done.stdout)
    checked = subprocess.run([shell, "-n", str(tmp_path / "script")], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
