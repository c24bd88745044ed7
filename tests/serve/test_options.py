"""The server's options: what is taken, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.serve.options import ServerConfig, split_options
from quire.serve.server import serve
from tests.serve import scripted
from tests.serve.running import MAKER


def test_flat_options_find_their_place() -> None:
    engine, server = split_options({"port": 9, "block_size": 32, "api_key": ("a",), "seed": 4})
    assert (server.port, engine.cache.block_size, server.api_keys(), engine.seed) == (9, 32, ("a",), 4)
    with pytest.raises(ConfigError, match="no_such"):
        split_options({"no_such": 1})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"port": 70000}, "--port"),
        ({"ssl_keyfile": "k"}, "--ssl-certfile"),
        ({"api_key": ("",)}, "--api-key"),
        ({"metrics_prefix": "a b"}, "--metrics-prefix"),
        ({"shutdown_timeout": -1.0}, "--shutdown-timeout"),
        ({"log_format": "xml"}, "--log-format"),
        ({"max_num_queued_reqs": 0}, "--max-num-queued-reqs"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerConfig(**options)  # type: ignore[arg-type]


def test_keys_come_from_options_and_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n  two \n")
    assert ServerConfig(api_key=("zero",), api_key_file=str(file)).api_keys() == ("zero", "one", "two")
    file.write_text("\n")
    with pytest.raises(ConfigError, match="no key"):
        ServerConfig(api_key_file=str(file)).api_keys()
    with pytest.raises(ConfigError, match="cannot be read"):
        ServerConfig(api_key_file=str(tmp_path / "none")).api_keys()


def test_check_tells_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"model": "scripted", "served_model_name": ("name",), "check": True, "port": 0}
    assert serve(*split_options(options), MAKER) == 0
    text = capsys.readouterr().out
    assert "2048 tokens" in text
    assert f"{scripted.NUM_BLOCKS} blocks" in text
    assert "name" in text
