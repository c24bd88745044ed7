"""`quire pull` and `quire models` against a stand-in of the hub, as a user types them; words of other programs."""

from __future__ import annotations

import json
import subprocess
import sys
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
    assert "files" not in pulled.stderr, "the hub's client draws its bar in a log"
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
    hub.models["owner/copy"] = hub.models["owner/real"]  # of the same commit, as copies on the hub are
    assert quire("pull", "owner/copy").returncode == 0
    assert quire("models", "rm", "owner/copy", "-y").stdout.startswith("removed owner/copy: ")
    assert [row["model"] for row in json.loads(quire("models", "--json").stdout)] == ["owner/real"]
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
    [
        ("run", "chat"),
        ("list", "models"),
        ("ls", "models"),
        ("show", "inspect"),
        ("rm", "models rm"),
        ("stop", "ps"),
        ("info", "inspect"),
        ("collect-env", "doctor"),
    ],
)
def test_words_of_other_programs_lead_to_the_command(word: str, command: str) -> None:
    result = quire(word, "x")
    assert result.returncode == 2
    assert result.stderr == f"quire: error: there is no command {word!r}: it is `quire {command}`\n"


def test_help_and_version_are_words_too() -> None:
    assert quire("help").stdout == quire("--help").stdout
    assert quire("help", "models", "rm").stdout == quire("models", "rm", "--help").stdout
    assert quire("version").stdout == quire("-V").stdout == quire("--version").stdout


def test_models_to_try_are_listed_with_what_fits_here() -> None:
    listed = json.loads(quire("models", "--suggest", "--json").stdout)
    assert {"model", "licence", "bytes", "parameters", "context", "fits", "tok_s_bound"} <= listed[0].keys()
    speeds = [each["tok_s_bound"] * each["read"] for each in listed]
    assert speeds == pytest.approx([speeds[0]] * len(speeds))  # by one measured bandwidth
    shown = quire("models", "--suggest").stdout
    assert all(each["model"] in shown and each["licence"] in shown for each in listed)
    assert "`quire models --suggest`" in quire("models").stdout


def test_the_shipped_model_says_in_a_chat_that_it_is_a_toy(hub: HubServer) -> None:
    def said(*args: str) -> str:
        command = [sys.executable, "-m", "quire.cli", "chat", *args]
        return subprocess.run(command, input="/quit\n", capture_output=True, text=True, timeout=240).stderr

    for args in ((), ("quire-stories",)):
        assert said(*args).count("is a toy") == 1
    assert "toy" not in said("owner/real")
    assert "toy" not in quire("chat", "-q", "Hello", "--max-tokens", "3").stderr


DRAFTERS = ("draft", "eagle3", "mtp", "mlp")


def test_what_the_package_holds_goes_by_name() -> None:
    plain = quire("generate", "Once", "--max-tokens", "12").stdout
    for drafter in DRAFTERS:
        name = f"quire-stories-{drafter}"
        for named in (["--spec-model", name], ["--speculative-config", json.dumps({"model": name})]):
            words = ["generate", "Once", "--model", "quire-stories", "--max-tokens", "12"]
            drafted = quire(*words, *named)
            assert (drafted.returncode, drafted.stdout) == (0, plain), drafted.stderr
    for command in ("where", "rm"):
        found = quire("models", command, "quire-stories-mtp")
        assert ("assets/quire-stories-mtp" in found.stdout) == (command == "where"), found.stderr


@pytest.mark.parametrize("name", ["quire-stories", "owner/real", "alone", "owner/real:Q4_K_M"])
def test_a_model_without_a_text_is_no_text(name: str, tmp_path: Path) -> None:
    (tmp_path / "models--alone").mkdir()
    result = quire("generate", name, "--download-dir", str(tmp_path))
    assert result.returncode == 2
    assert f"{name} names a model, and no text follows: quire generate {name} TEXT" in result.stderr
    assert quire("generate", "once", "--max-tokens", "2").returncode == 0
