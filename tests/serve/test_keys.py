"""Keys that clients of a server take from a file, an option or the environment, as a user types them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.serve.options import ServerConfig
from tests.hub_server import quire
from tests.serve.running import Server, start

KEY = "a-key-that-nobody-sees"
CLIENTS = {
    "chat": ["chat", "-q", "Hi", "--url"],
    "complete": ["complete", "Hi", "--url"],
    "bench": ["bench", "serve", "--num-prompts", "1", "--input-len", "4", "--output-len", "2", "--base-url"],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("server") / "keys"
    file.write_text(f"another\n{KEY}\n")
    started = start(api_key_file=str(file))
    yield started
    started.stop()
    assert KEY not in started.log


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest, server: Server, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for name in ("QUIRE_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return [*CLIENTS[request.param], server.url]


def test_a_key_comes_from_a_file_or_the_environment(
    client: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_text(f"\n{KEY}\nnext line\n")
    done = quire(*client, "--api-key-file", str(file))
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("QUIRE_API_KEY", KEY)
    found = quire(*client)
    assert found.returncode == 0, found.stderr
    assert KEY not in done.stdout + done.stderr + found.stdout + found.stderr


def test_a_key_that_is_refused_names_the_option(client: list[str], tmp_path: Path) -> None:
    none, wrong = quire(*client), quire(*client, "--api-key", "wrong-key")
    assert "the server needs a key: give --api-key-file FILE, --api-key KEY or" in none.stderr
    assert "the server does not take the key of --api-key, --api-key-file or" in wrong.stderr
    for done in (none, wrong):
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
        assert "Bearer" not in done.stderr
        assert "wrong-key" not in done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file"),
        ("\n", "holds no key"),
        ("sécret", "characters other than ASCII's"),
        ("a\x00b", "characters other than ASCII's"),
    ],
)
def test_files_that_hold_no_key(client: list[str], tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "key"
    if text is not None:
        file.write_text(text)
    done = quire(*client, "--api-key-file", str(file))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert said in done.stderr
    assert "--api-key-file" in done.stderr
    assert "cret" not in done.stderr.replace(str(file), "")


def test_one_key_is_given(client: list[str]) -> None:
    done = quire(*client, "--api-key", KEY, "--api-key-file", "keys")
    assert (done.returncode, KEY in done.stderr) == (2, False)
    assert "pass --api-key or --api-key-file, not both" in done.stderr


def test_a_file_of_keys_is_read_once() -> None:
    """It may be a pipe, as in `--api-key-file <(pass show key)`."""
    options: dict[str, Any] = {}
    for name in ("api_key", "admin_api_key"):
        end, other = os.pipe()
        os.write(other, f"{name}-1\n{name}-2\n".encode())
        os.close(other)
        options[f"{name}_file"] = f"/dev/fd/{end}"
    config = replace(ServerConfig(**options), port=1)
    for _ in range(2):
        assert config.api_keys() == ("api_key-1", "api_key-2")
        assert config.admin_api_key == ("admin_api_key-1", "admin_api_key-2")
        config.keys()
