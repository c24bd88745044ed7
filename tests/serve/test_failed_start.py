"""A server that cannot start says why in one line, as a user of the command sees it."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.build import build_engine
from quire.config import EngineConfig
from quire.model.info import EngineLimits
from tests.tiny import write_checkpoint


def serve(*args: str, limit: str = "") -> tuple[int, list[str]]:
    """Exit status and the lines of the standard error of `quire serve`, without its log. `limit` is for ulimit.

    It takes a free port unless `args` name one: an unlucky machine's 8000 would be the error.
    """
    port = () if "--port" in args else ("--port", "0")
    command = [sys.executable, "-W", "error", "-m", "quire.cli", "serve", *args, *port]
    if limit:
        command = ["/bin/sh", "-c", f'ulimit {limit}; exec "$@"', "sh", *command]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return result.returncode, [line for line in result.stderr.splitlines() if " INFO " not in line]


def refused(message: str, *args: str, status: int = 1) -> None:
    """Status 1 is the fault of the model or the machine, 2 of an option."""
    found, lines = serve(*args)
    assert found == status, lines
    assert len(lines) == 1, lines
    assert lines[0].startswith("quire: error: ")
    assert message in lines[0]


@pytest.fixture
def model(tiny_model: Callable[..., str], tmp_path: Path) -> Path:
    """A checkpoint of the test's own."""
    return Path(shutil.copytree(tiny_model(), tmp_path / "model"))


@pytest.fixture(scope="module")
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_no_such_model() -> None:
    refused("'/no/such/path' is neither an existing directory nor", "/no/such/path")


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    refused("no config.json", str(tmp_path))


def test_a_model_without_a_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    refused("has no tokenizer", str(model))


def test_a_tokenizer_that_is_no_json(model: Path) -> None:
    (model / "tokenizer.json").write_text("{")
    refused("tokenizer.json", str(model))


@pytest.mark.parametrize("text", ["{", "[]", "\0"])
def test_a_config_that_is_no_json_object(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    refused("config.json", str(model))


def test_a_config_field_that_is_not_understood(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "attn_logit_softcapping": 30.0}))
    refused("attn_logit_softcapping", str(model), "--model-impl", "quire")


def test_an_unknown_architecture(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchForCausalLM"]}))
    refused("NoSuchForCausalLM", str(model), "--model-impl", "quire")


def test_weights_that_were_cut_short(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    refused("model.safetensors", str(model))


def test_missing_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    refused("safetensors", str(model))


def test_an_engine_with_a_changed_byte(tiny_model: Callable[..., str], tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    build_engine(EngineConfig.from_options(model=tiny_model()), engine, EngineLimits())
    data = bytearray((engine / "weights.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (engine / "weights.bin").write_bytes(data)
    refused("weights.bin", str(engine))


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine for two ranks."""
    folder = tmp_path_factory.mktemp("divided")
    model = write_checkpoint(folder / "model")
    build_engine(EngineConfig.from_options(model=str(model), tensor_parallel_size=2), folder / "engine")
    return folder / "engine"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["engine.1.json", "weights.1.bin"])
@pytest.mark.parametrize("damage", [Path.unlink, cut, flip])
def test_a_share_of_a_rank_that_is_missing_or_damaged(
    divided: Path, tmp_path: Path, damage: Callable[[Path], None], name: str
) -> None:
    engine = Path(shutil.copytree(divided, tmp_path / "engine"))
    damage(engine / name)
    status, lines = serve(str(engine), "-tp", "2")
    assert (status, len(lines)) == (1, 1), lines
    assert lines[0].startswith(f"quire: error: rank 1 failed: {engine / name}"), lines
    assert lines[0].endswith("; run `quire build` or `quire convert` again")


def test_a_directory_for_another_number_of_ranks(divided: Path) -> None:
    refused("was built for --tensor-parallel-size 2, and 4 is asked", str(divided), "-tp", "4", status=2)


def test_a_port_that_is_taken(tiny_model: Callable[..., str], taken: int) -> None:
    refused(f"change --port {taken}", tiny_model(), "--port", str(taken))


def test_an_address_that_is_not_this_machines(tiny_model: Callable[..., str]) -> None:
    refused("change --host 192.0.2.1", tiny_model(), "--host", "192.0.2.1")


def test_a_socket_that_cannot_be_made(tiny_model: Callable[..., str]) -> None:
    refused("--uds", tiny_model(), "--uds", "/no/such/directory/socket", status=2)


def test_too_little_memory(tiny_model: Callable[..., str]) -> None:
    refused("--kv-cache-memory-bytes", tiny_model(), "--kv-cache-memory-bytes", str(1 << 50))


def test_a_context_that_does_not_fit(tiny_model: Callable[..., str]) -> None:
    options = ("--num-gpu-blocks-override", "1", "--max-model-len", "512")
    refused("--max-model-len", tiny_model(), *options)


def test_a_context_beyond_the_models(tiny_model: Callable[..., str]) -> None:
    refused("--max-model-len 100000", tiny_model(), "--max-model-len", "100000", status=2)


@pytest.mark.parametrize("template", ["{{", "{% if %}"])
def test_a_template_that_does_not_parse(tiny_model: Callable[..., str], template: str) -> None:
    refused("template", tiny_model(), "--chat-template", template)


@pytest.mark.parametrize("option", ["--api-key-file", "--config"])
def test_a_file_that_is_absent(tiny_model: Callable[..., str], option: str) -> None:
    refused(option, tiny_model(), option, "/no/such/file", status=2)


def test_a_certificate_that_is_absent(tiny_model: Callable[..., str]) -> None:
    files = ("--ssl-keyfile", "/no/key", "--ssl-certfile", "/no/certificate")
    refused("--ssl-certfile", tiny_model(), *files, status=2)


def test_an_instruction_set_of_another_machine(tiny_model: Callable[..., str]) -> None:
    refused("neon", tiny_model(), "--isa", "neon")


def test_a_tokenizer_of_another_place(tiny_model: Callable[..., str]) -> None:
    refused("/no/tokenizer", tiny_model(), "--tokenizer", "/no/tokenizer")


@pytest.mark.parametrize(("limit", "words"), [("-n 10", "(ulimit -n)"), ("-v 200000", "(ulimit -v)")])
@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not enforce these limits")
def test_limits_that_are_too_low(tiny_model: Callable[..., str], limit: str, words: str) -> None:
    status, lines = serve(tiny_model(), limit=limit)
    assert (status, len(lines)) == (1, 1), lines
    assert lines[0].startswith("quire: error: the limit on ")
    assert words in lines[0]


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (("/no/such/path", "--log-format", "json"), 1, "neither an existing directory"),
        (("--log_format=json", "--blah"), 2, "there is no option --blah"),
        (("--log-format", "json", "--ssl-ciphers", "X"), 2, "need --ssl-certfile"),
    ],
)
def test_errors_are_json_if_the_log_is(args: tuple[str, ...], status: int, words: str) -> None:
    found, (line,) = serve(*args)
    entry = json.loads(line)
    assert found == status
    assert entry["level"] == "error"
    assert words in entry["message"]


@pytest.mark.parametrize(
    ("message", "status", "args"),
    [
        ("lora-nope", 1, ["--enable-lora", "--lora-modules", "a=./lora-nope"]),
        ("--lora-modules needs --enable-lora", 2, ["--lora-modules", "a=b"]),
        ("chat template", 1, ["--chat-template", "{%"]),
        ("neither a file nor text", 2, ["--chat-template", "none.jinja"]),
        ("--middleware 'no.such' cannot be imported", 2, ["--middleware", "no.such"]),
        ("--logits-processors 'no:Such' cannot be imported", 2, ["--logits-processors", "no:Such"]),
        ("--tool-parser-plugin", 2, ["--tool-parser-plugin", "none.py"]),
        ("--api-key-file", 2, ["--api-key-file", "none"]),
        ("--ssl-certfile", 2, ["--ssl-keyfile", "none", "--ssl-certfile", "none"]),
        ("./no-drafter", 1, ["--spec-model", "./no-drafter"]),
        ("--log-config-file", 2, ["--log-config-file", "none"]),
        ("leave out --node-rank", 2, ["--nnodes", "2", "-tp", "2", "--node-rank", "1"]),
    ],
)
def test_a_check_refuses_what_a_start_would(message: str, status: int, args: list[str]) -> None:
    refused(message, "--check", *args, status=status)


def test_a_check_tries_the_port_and_gives_it_back(taken: int, tmp_path: Path) -> None:
    refused("cannot listen", "--check", "--port", str(taken))
    place = tmp_path / "socket"
    assert serve("--check", "--uds", str(place)) == (0, [])
    assert not place.exists()
