"""A model of the hub is looked at before its weights are fetched. A stand-in on loopback serves the files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM
from quire.config import EngineConfig
from quire.engine.directory import load_tokenizer, model_directory
from quire.engine.plan import plan_engine
from quire.errors import ConfigError, ModelError
from quire.meter import in_bytes
from quire.weights.hub import find_model
from tests.gguf_files import write_gguf
from tests.hub_server import HubServer, hub_server, quire

WEIGHTS = (".safetensors", ".gguf", ".bin")
SIZES = {"hidden_size": 256, "intermediate_size": 1536, "head_dim": 64}
HEADER = 2 << 20  # bytes, more than are asked for first


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server(tmp_path, monkeypatch, **SIZES) as server:
        yield server


def config(model: str = "owner/real", **options: object) -> EngineConfig:
    return EngineConfig.from_options(model=model, threads=1, **options)


def change(folder: Path, **keys: object) -> None:
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | keys))


@pytest.mark.parametrize("command", ["plan", "inspect"])
def test_a_plan_fetches_no_weights(command: str, hub: HubServer) -> None:
    folder = hub.models["owner/real"]
    assert (folder / "model.safetensors").stat().st_size > 2 * HEADER
    result, local = quire(command, "owner/real", "--json"), quire(command, str(folder), "--json")
    assert result.returncode == 0, result.stderr
    for name in ("parameters", "weight_bytes", "dtype"):
        assert json.loads(result.stdout)[name] == json.loads(local.stdout)[name]
    assert 0 < hub.fetched(*WEIGHTS) <= HEADER


def test_a_plan_of_a_gguf_file_reads_its_head(hub: HubServer, tmp_path: Path) -> None:
    folder = tmp_path / "gguf"
    folder.mkdir()
    write_gguf(hub.models["owner/real"], folder / "real-Q4_K_M.gguf")
    write_gguf(hub.models["owner/real"], folder / "real-Q8_0.gguf")
    hub.models["owner/real-GGUF"] = folder
    size = (folder / "real-Q4_K_M.gguf").stat().st_size
    figures = json.loads(quire("plan", "owner/real-GGUF", "--json").stdout)
    assert (figures["disk_bytes"], figures["disk_bytes_here"]) == (size, 0)
    assert 0 < hub.fetched(*WEIGHTS) <= HEADER
    assert find_model("owner/real-GGUF").name == "real-Q4_K_M.gguf"
    planned = quire("plan", "owner/real-GGUF").stdout
    assert planned.startswith("owner/real-GGUF on ")
    assert f"{in_bytes(size)}, all here" in planned
    assert "real-Q8_0.gguf" not in hub.sent
    (folder / "real-Q4_K_M.gguf").rename(folder / "real-Q6_K.gguf")
    with pytest.raises(ModelError, match=r"found real-Q6_K\.gguf, real-Q8_0\.gguf; name the file"):
        find_model("owner/real-GGUF")
    with pytest.raises(ModelError, match=r"found none; it has real-Q6_K\.gguf"):
        find_model("owner/real-GGUF:Q2_K")
    assert find_model("owner/real-GGUF:q8_0").name == "real-Q8_0.gguf"
    (folder / "real-Q8_0.gguf").rename(folder / "real-Q8_0-00001-of-00002.gguf")
    with pytest.raises(ModelError, match=r"real-Q8_0-00002-of-00002\.gguf is not"):
        find_model("owner/real-GGUF:Q8_0")


def test_what_does_not_fit_is_told_before_the_weights_come(hub: HubServer) -> None:
    with pytest.raises(ConfigError, match="do not fit"):
        plan_engine(config(max_num_batched_tokens=1 << 22, kv_cache_memory_bytes=1 << 60))
    assert hub.fetched(*WEIGHTS) <= HEADER


def test_what_is_not_supported_is_told_before_the_weights_come(hub: HubServer) -> None:
    change(hub.models["owner/real"], architectures=["UnheardOfForCausalLM"], model_type="unheard")
    for look in (lambda: plan_engine(config()), lambda: model_directory(config().model)):
        with pytest.raises(ModelError, match=r"owner/real/config\.json.*UnheardOf"):
            look()
    assert hub.fetched(*WEIGHTS) <= 4 * HEADER


def test_a_full_disk_is_told_before_the_weights_come(hub: HubServer, tmp_path: Path) -> None:
    hub.sizes["model.safetensors"] = 1 << 60
    with pytest.raises(
        ModelError, match=r"1152921504\.6 GB must be fetched and .* GB are free in .*cache: make room"
    ):
        find_model("owner/real")
    assert hub.fetched(*WEIGHTS) == 0


def test_a_repository_without_weights_says_what_it_has(hub: HubServer) -> None:
    (hub.models["owner/real"] / "model.safetensors").rename(hub.models["owner/real"] / "flax.msgpack")
    with pytest.raises(ModelError, match=r"holds no weights that Quire reads: it has config\.json"):
        model_directory(config().model)


def test_a_model_generates_and_is_fetched_once(
    hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM("owner/real", threads=1, max_model_len=64)
    local = LLM(str(hub.models["owner/real"]), threads=1, max_model_len=64)
    texts = [each.generate("Once", use_tqdm=False)[0].outputs[0].text for each in (llm, local)]
    assert texts[0] == texts[1]
    size = (hub.models["owner/real"] / "model.safetensors").stat().st_size
    assert size <= hub.fetched("model.safetensors") <= size + HEADER
    assert "MB of weights; fetching" in caplog.text
    hub.sent.clear()
    LLM("owner/real", threads=1, max_model_len=64)
    assert hub.fetched(*WEIGHTS) == 0


def test_a_tokenizer_needs_no_weights(hub: HubServer) -> None:
    assert load_tokenizer(config().model).encode("Once")
    assert hub.fetched(*WEIGHTS) <= HEADER


def test_modules_of_sentence_transformers_come_along(hub: HubServer) -> None:
    folder = hub.models["owner/real"]
    for name in (
        "1_Pooling/config.json",
        "2_Dense/model.safetensors",
        "onnx/model.onnx",
        "original/params.json",
    ):
        (folder / name).parent.mkdir()
        (folder / name).write_text("{}")
    found = find_model("owner/real")
    assert {path.parent.name for path in found.glob("*/*")} == {"1_Pooling", "2_Dense"}


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        ((404, "RepoNotFound"), "not a directory here and not a model on the hub"),
        ((401, "RepoNotFound"), "not a directory here and not a model on the hub"),
        ((403, "GatedRepo"), "is gated: accept its terms on its page"),
        ((500, ""), "not in the cache, and the hub cannot be reached"),
    ],
)
def test_a_refusal_is_one_line(refused: tuple[int, str], message: str, hub: HubServer) -> None:
    hub.refused["owner/real"] = refused
    for command in (("plan",), ("inspect",), ("generate", "Once", "--model"), ("quantize", "-o", "x")):
        result = quire(*command, "owner/real")
        assert result.returncode == 1
        (line,) = result.stderr.splitlines()
        assert message in line, line


def test_a_transfer_that_breaks_off_is_one_line(hub: HubServer) -> None:
    hub.broken.add("model.safetensors")
    with pytest.raises(ModelError, match=r"^owner/real cannot be fetched from the hub: [^\n]*$"):
        plan_engine(config())
