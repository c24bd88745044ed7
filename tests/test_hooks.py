"""What installed distributions add: endpoints to every server, flags to every command."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from quire import hooks
from quire.cli import main
from quire.commands import serve
from quire.errors import ConfigError
from quire.flags import table
from quire.serve.options import ServerConfig


def register(directory: Path, **groups: str) -> None:
    """Write the metadata of a distribution with an entry point `made` in each group."""
    made = directory / "made-1.dist-info"
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: made\nVersion: 1\n")
    lines = [f"[quire.{group}]\nmade = {value}\n" for group, value in groups.items()]
    (made / "entry_points.txt").write_text("".join(lines))


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--longest", dest="longest", type=int, default=argparse.SUPPRESS)


def read_options(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    return {"max_model_len": given["longest"]}, ["--longest is old"]


def test_a_flag_of_a_dialect_becomes_quires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    register(tmp_path, flags="tests.test_hooks")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[Any] = []
    monkeypatch.setattr(
        serve, "COMMAND", type(serve.COMMAND)(lambda *given: seen.append(given), ServerConfig, ("model",))
    )
    main(["serve", "--longest", "64", "m"])
    assert (seen[0][0].model.max_model_len, seen[0][0].model.model) == (64, "m")
    assert "--longest is old" in caplog.text


def test_known_flags_read_no_table_and_load_no_dialect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "vllm_data", lambda: pytest.fail("read"))
    table.engine_flags.cache_clear()
    table.vllm_flags.cache_clear()
    monkeypatch.setattr(metadata, "entry_points", lambda **group: pytest.fail("looked up"))
    monkeypatch.setattr(serve, "COMMAND", type(serve.COMMAND)(lambda *given: None, ServerConfig, ("model",)))
    main(["serve", "--max-model-len", "64", "m"])


def test_a_broken_hook_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(tmp_path, flags="no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"no_such_module, installed for quire\.flags, cannot be loaded"):
        hooks.load_hooks(hooks.FLAGS)
