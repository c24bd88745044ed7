"""docs/first-day.md: every command runs, in order, as a user types it; a stand-in of the hub serves the model."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gguf_files import write_gguf
from tests.hub_server import HubServer, hub_server, quire
from tests.pages import ADDRESS, curl, serve

PAGE = (Path(__file__).parent.parent / "docs" / "first-day.md").read_text()
MODEL = "Qwen/Qwen3-4B-GGUF"
BLOCKS = re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
LINES = [line for block in BLOCKS for line in block.splitlines()]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    for name in ("HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"):
        place = tmp_path / name
        place.mkdir(mode=0o700)
        monkeypatch.setenv(name, str(place))
    with hub_server(tmp_path, monkeypatch) as server:
        folder = tmp_path / "gguf"
        folder.mkdir()
        for tag in ("Q4_K_M", "Q8_0"):
            write_gguf(tmp_path / "real", folder / f"Qwen3-4B-{tag}.gguf")
        server.models[MODEL] = folder
        yield server


def test_every_command_of_the_page_runs(hub: HubServer) -> None:
    said: dict[str, str] = {}
    server: subprocess.Popen[str] | None = None
    url = ADDRESS
    try:
        for line in LINES:
            if line.startswith("quire serve"):
                server, url = serve(line)
            elif line.startswith("curl"):
                said[line] = curl(line.replace(ADDRESS, url))
            else:
                ran = quire(*shlex.split(line.replace(ADDRESS, url))[1:])
                assert ran.returncode == 0, f"{line}: {ran.stderr}"
                said[line] = ran.stdout
    finally:
        if server is not None:
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=60)
    assert server is not None
    assert server.returncode == 0
    assert MODEL in said["quire models --suggest"]
    assert said[f"quire plan {MODEL}"].startswith(MODEL)
    assert said[f"quire models where {MODEL}"].strip() in said[f"quire pull {MODEL}"]
    assert MODEL in said["quire models"]
    assert "Qwen/" in said["quire ps"]
    answer = next(text for line, text in said.items() if "/v1/chat/completions" in line)
    assert json.loads(answer)["choices"][0]["message"]["content"]
    assert said[f"quire models rm {MODEL} --yes"].startswith(f"removed {MODEL}")
    assert json.loads(quire("models", "--json").stdout) == []
    assert hub.fetched("Q8_0.gguf") == 0


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        ((404, "RepoNotFound"), "is not a directory here and not a model on the hub"),
        ((401, "RepoNotFound"), "is not a directory here and not a model on the hub"),
        ((403, "GatedRepo"), "is gated"),
    ],
)
def test_what_the_page_says_of_refusals_is_said(
    refused: tuple[int, str], message: str, hub: HubServer
) -> None:
    hub.refused[MODEL] = refused
    ran = quire("pull", MODEL)
    assert ran.returncode == 1
    assert message in ran.stderr
    assert message in PAGE


def test_a_transfer_that_breaks_goes_on(hub: HubServer) -> None:
    """Slowly, at last."""
    hub.broken.add("Qwen3-4B-Q4_K_M.gguf")
    ran = quire("pull", MODEL)
    assert (ran.returncode, len(ran.stderr.splitlines())) == (1, 1), ran.stderr
    assert "cannot be fetched from the hub" in ran.stderr
    hub.broken.clear()
    hub.slow = True
    ran = quire("pull", MODEL)
    assert ran.returncode == 0, ran.stderr
    source = hub.models[MODEL] / "Qwen3-4B-Q4_K_M.gguf"
    assert Path(ran.stdout.strip()).read_bytes() == source.read_bytes()


def test_a_name_that_is_misspelt_is_found_in_the_cache(hub: HubServer) -> None:
    assert quire("pull", MODEL).returncode == 0
    misspelt = MODEL.replace("Qwen3", "Qven3")
    for network in (True, False):
        hub.refused[MODEL.replace("Qwen3", "Qven3")] = (404, "RepoNotFound") if network else (503, "")
        for command in (("plan",), ("generate", "--model")):
            ran = quire(*command, misspelt)
            assert ran.returncode == 1
            assert ran.stderr.endswith(f"did you mean {MODEL}?\n"), ran.stderr
