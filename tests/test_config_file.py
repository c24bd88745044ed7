"""Options in files, as a user has them: the user's own file, one that --config names, the command line over both."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from quire.cli import COMMANDS, Program, load_command, main
from quire.flags.config_file import user_file
from quire.flags.table import ENGINE_OPTIONS
from quire.serve.options import split_options
from tests.hub_server import quire


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own file, which is not there yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home" / "quire.yaml"


def taken(monkeypatch: pytest.MonkeyPatch, name: str, *args: str) -> list[Any]:
    """What a command would run with."""
    seen: list[Any] = []
    found = load_command(name, Program())
    command = type(found)(lambda *given: seen.extend(given), found.options, found.arguments, found.uses)
    with monkeypatch.context() as patch:
        patch.setattr(f"{COMMANDS[name].module}.{COMMANDS[name].attribute}", command)
        main([*name.split(), *args])
    return seen


def refusal(*args: str) -> str:
    """The one line of a command that refuses its options."""
    done = quire(*args)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
    return done.stderr


def test_the_command_line_then_config_then_the_users_file(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine.write_text(
        "max-model-len: 100\ndtype: half\nblock_size: 32\nmodel: theirs\nplan:\n  batch-size: 3\n  input-len: 9\n"
    )
    other = tmp_path / "other.yaml"
    other.write_text("max_model_len: 2k\nmodel: mine\nplan: {input_len: 10}\nserve: {no_such: 1}\n")
    engine, own = taken(monkeypatch, "plan", "--config", str(other), "--dtype", "float32")
    assert (engine.model.max_model_len, engine.model.dtype, engine.cache.block_size) == (2000, "float32", 32)
    assert (own.batch_size, own.input_len, own.config) == (3, 10, "")
    for words in (["given"], ["--model", "given"], ["--model=given"]):
        assert taken(monkeypatch, "plan", "--config", str(other), *words)[0].model.model == "given"
    assert taken(monkeypatch, "generate", "Once")[0].model.model == "theirs"


def test_a_plan_reads_the_users_file_through_the_real_command_line(mine: Path, tmp_path: Path) -> None:
    mine.write_text("max-model-len: 100\nport: 9\nplan:\n  batch-size: 3\n  json: true\n")
    found = json.loads(quire("plan").stdout)
    assert (found["max_model_len"], found["batch_size"]) == (100, 3)
    assert json.loads(quire("plan", "--max-model-len", "64").stdout)["max_model_len"] == 64


def test_options_that_another_command_has_disturb_none(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain option of each command, an engine's, another engine's and a section."""
    mine.write_text(
        "port: 9\nurl: http://127.0.0.1:9\nbackend: torch\nmodel: a/model\nenforce-eager: true\n"
        "num-prompts: 3\nserve: {log-level: debug}\nmodels rm: {yes: true}\nbench-serve: {port: 8}\n"
    )
    needed = {"route": ("--replica", "http://127.0.0.1:1", "--router-api-key", "k")}
    seen = {name: taken(monkeypatch, name, *needed.get(name, ()))[-1] for name in COMMANDS}
    assert (seen["serve"].port, seen["serve"].log_level) == (9, "debug")
    assert (seen["bench serve"].port, seen["bench serve"].backend) == (8, "openai")
    assert (seen["complete"].url, seen["complete"].model) == ("http://127.0.0.1:9", "")
    assert (seen["models rm"].yes, seen["models rm"].model) == (True, "")


def test_no_option_is_named_as_a_command() -> None:
    """So that a key is an option or a section."""
    options = {f.name for name in COMMANDS for f in fields(load_command(name, Program()).options)}
    assert not (options | ENGINE_OPTIONS) & {name.replace(" ", "_") for name in COMMANDS}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-modle-len: 5", "unknown option 'max_modle_len'; did you mean max_model_len?"),
        ("porrt: 5", "unknown option 'porrt'; did you mean port?"),
        ("plan: {port: 5}", "plan does not use port: leave it out"),
        ("plan: 5", "plan must hold a map"),
        ("plan: {batch-size: x}", "batch_size: Expected `int`, got `str`"),
        ("threads: 0", "--threads must be at least 1, got 0"),
        ("plan: {batch-size: 0}", "--batch-size must be at least 1, got 0"),
        ("dtype: int7", "dtype: Invalid enum value 'int7'"),
        ("worker-cls: a.B", "--worker-cls a.B is not supported"),
        ("a: [", "cannot be read: while parsing"),
        ("a: 2020-13-45", "cannot be read: month"),
        ("[" * 5000, "cannot be read: "),
        ("\xff", "cannot be read: "),
    ],
)
def test_a_slip_names_the_file(mine: Path, tmp_path: Path, text: str, said: str) -> None:
    mine.write_bytes(text.encode("latin-1"))
    told = refusal("plan")
    assert said in told
    assert str(mine) in told
    other = tmp_path / "other.yaml"
    mine.rename(other)
    told = refusal("plan", "--config", str(other))
    assert said.replace("; did you mean port?", "") in told
    assert str(other) in told


def test_a_file_that_config_names_is_for_this_command(mine: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("port: 5\n")
    assert "generate does not use port: leave it out" in refusal("generate", "Once", "--config", str(other))
    assert "cannot be read: No such file" in refusal("models", "--config", str(tmp_path / "none.yaml"))
    mine.mkdir()
    assert "cannot be read: Is a directory" in refusal("models")


def test_what_replaces_an_option_replaces_it_in_files(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine.write_text("model: a/model\nchat: {url: 'http://127.0.0.1:8'}\n")
    engine, own = taken(monkeypatch, "chat")
    assert (engine.model.model, own.url) == ("", "http://127.0.0.1:8")
    engine, own = taken(monkeypatch, "chat", "name")
    assert (engine.model.model, own.url) == ("name", "http://127.0.0.1:8")
    engine, own = taken(monkeypatch, "chat", "--url", "http://127.0.0.1:9")
    assert (engine.model.model, own.url) == ("", "http://127.0.0.1:9")
    engine, own = taken(monkeypatch, "plan", "--config", "config.json")
    assert (engine.model.model, own.config) == ("", "config.json")


def test_the_users_file_is_found_by_xdg(mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert user_file() is None
    mine.touch()
    assert user_file() == mine
    for place in ("", "relative"):
        monkeypatch.setenv("XDG_CONFIG_HOME", place)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert user_file() is None
    (tmp_path / ".config").mkdir()
    (tmp_path / ".config" / "quire.yaml").touch()
    assert user_file() == tmp_path / ".config" / "quire.yaml"


def test_a_plain_run_reads_no_yaml() -> None:
    code = "import sys; from quire import cli; cli.main(['models']); print('yaml' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_the_log_names_the_files(mine: Path, tmp_path: Path) -> None:
    mine.write_text("api-key: SECRET\nport: 0\n")
    other = tmp_path / "other.yaml"
    other.write_text("max-model-len: nonsense\n")
    assert str(other) in refusal("serve", "--config", str(other))
    other.write_text("model: no/such\nload-format: safetensors\n")
    log = quire("serve", str(tmp_path / "none"), "--config", str(other)).stderr
    assert f"options of {mine}" in log
    assert f"options of {other}" in log
    assert "SECRET" not in log


def served(text: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is asked of `quire serve` by a file, beyond the defaults."""
    file.write_text(text)
    engine, server = taken(monkeypatch, "serve", "--config", str(file))
    plain_engine, plain = split_options({})
    parts = [(server, plain)]
    parts += [
        (getattr(engine, f.name), getattr(plain_engine, f.name)) for f in fields(engine) if f.name != "seed"
    ]
    return {
        f.name: getattr(part, f.name)
        for part, default in parts
        for f in fields(part)
        if getattr(part, f.name) != getattr(default, f.name)
    }


def test_yaml_takes_flags_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "model: scripted\nmax-model-len: 100\nblock_size: 8\napi-key: [a, 7]\nserved-model-name: m\n"
        "enable-prefix-caching: false\nshutdown-timeout: 5\nrequest-timeout: null\n"
    )
    assert served(text, tmp_path / "serve.yaml", monkeypatch) == {
        "model": "scripted",
        "max_model_len": 100,
        "block_size": 8,
        "api_key": ("a", "7"),
        "served_model_name": ("m",),
        "enable_prefix_caching": False,
        "shutdown_timeout": 5.0,
    }
    assert served("# nothing\n", tmp_path / "serve.yaml", monkeypatch) == {}
    units = "gpu-memory-utilization: 90%\nmax-num-seqs: 1e3\nthreads: auto\nport: 9\nkv-cache-memory-bytes: 1GiB\n"
    assert served(units, tmp_path / "serve.yaml", monkeypatch) == {
        "gpu_memory_utilization": 0.9,
        "max_num_seqs": 1000,
        "port": 9,
        "kv_cache_memory_bytes": 2**30,
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 1", "unknown option 'prot'"),
        ("port: '8000'", "port: Expected `int`, got `str`"),
        ("port: true", "port: Expected `int`, got `bool`"),
        ("enable-prefix-caching: 1", "Expected `bool`"),
        ("api-key: [[a]]", "api_key"),
        ("block-size: 8\nblock_size: 9", "twice"),
        ("- a", "must hold a map"),
        ("a: [", "cannot be read"),
    ],
)
def test_yaml_refuses_by_name(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    assert words in refusal("serve", "--config", str(file))
