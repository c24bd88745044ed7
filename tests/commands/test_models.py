"""`quire pull` and `quire models` against a stand-in of the hub, as a user types them; words of other programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub_server import HubServer, hub_server, quire


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server(tmp_path, monkeypatch) as server:
        yield server


def test_a_model_is_pulled_listed_found_and_removed(hub: HubServer, tmp_path: Path) -> None:
    assert json.loads(quire("models", "--json").stdout) == []
    pulled = quire("pull", "owner/real")
    assert pulled.returncode == 0, pulled.stderr
    place = Path(pulled.stdout.strip())
    assert (place / "model.safetensors").read_bytes() == (
        tmp_path / "real" / "model.safetensors"
    ).read_bytes()
    (listed,) = json.loads(quire("models", "--json").stdout)
    assert (listed["model"], listed["type"]) == ("owner/real", "llama")
    assert listed["bytes"] >= (tmp_path / "real" / "model.safetensors").stat().st_size
    shown = quire("models").stdout
    assert "owner/real" in shown
    assert "quire-stories" in shown
    assert Path(quire("models", "where", "owner/real").stdout.strip()) == place
    assert "say --yes to remove it" in quire("models", "rm", "owner/real").stderr
    assert place.is_dir()
    near = quire("models", "rm", "owner/reel", "--yes")
    assert (near.returncode, near.stderr) == (
        1,
        "quire: error: owner/reel is not in the cache; did you mean owner/real?\n",
    )
    assert quire("models", "rm", "owner/real", "-y").stdout.startswith("removed owner/real: ")
    assert json.loads(quire("models", "--json").stdout) == []


def test_a_model_that_is_not_supported_is_not_pulled(hub: HubServer) -> None:
    path = hub.models["owner/real"] / "config.json"
    about = json.loads(path.read_text())
    path.write_text(json.dumps(about | {"architectures": ["UnheardOf"], "model_type": "unheard"}))
    pulled = quire("pull", "owner/real")
    assert pulled.returncode == 1
    assert "UnheardOf" in pulled.stderr
    assert not list(path.parent.parent.joinpath("cache").rglob("model.safetensors"))


@pytest.mark.parametrize(
    ("word", "command"),
    [("run", "chat"), ("list", "models"), ("ls", "models"), ("show", "inspect"), ("rm", "models rm")],
)
def test_words_of_other_programs_lead_to_the_command(word: str, command: str) -> None:
    result = quire(word, "x")
    assert result.returncode == 2
    assert result.stderr == f"quire: error: there is no command {word!r}: it is `quire {command}`\n"


def test_help_and_version_are_words_too() -> None:
    assert quire("help").stdout == quire("--help").stdout
    assert quire("help", "models", "rm").stdout == quire("models", "rm", "--help").stdout
    assert quire("version").stdout == quire("-V").stdout == quire("--version").stdout
