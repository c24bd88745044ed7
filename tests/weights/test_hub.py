"""Model arguments: directories, hub ids, and what is neither. The hub itself is a stand-in here."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from quire.errors import ModelError
from quire.weights.download import MAX_ADAPTER, find_adapter
from quire.weights.hub import existing, find_model


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the stand-in answers."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


class Hub:
    """Stands in for snapshot_download: hands out the files that the patterns allow."""

    def __init__(self, folder: Path, files: list[str]) -> None:
        self.folder, self.files = folder, files
        self.calls: list[dict[str, Any]] = []

    def __call__(self, repo_id: str, **options: Any) -> str:
        self.calls.append({"repo_id": repo_id, **options})
        for file in self.files:
            allowed = any(fnmatch.fnmatch(file, pattern) for pattern in options["allow_patterns"])
            if allowed and not any(fnmatch.fnmatch(file, pattern) for pattern in options["ignore_patterns"]):
                (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / file).touch()
        return str(self.folder)


def fetched(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert find_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "./absent",
        "/no/such/model",
        "~/no-such-model",
        "a/b/c",
        "../x/y",
        "a b",
        "C:\\models",
        "m.gguf",
        "a/b.safetensors",
    ],
)
def test_a_path_that_is_not_there_is_refused_without_asking_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub = Hub(tmp_path, [])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    with pytest.raises(ModelError, match="neither an existing directory nor a"):
        find_model(name)
    assert not hub.calls


@pytest.fixture
def odd(tmp_path: Path) -> list[str]:
    """Paths at which the operating system fails in its own ways."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "to").symlink_to(tmp_path / "fro")
    (tmp_path / "fro").symlink_to(tmp_path / "to")
    names = ["~nosuchuser/x", "a\0b", "\ud800", f"{tmp_path}/{'n' * 300}", "/".join(["d" * 200] * 50), "l" * 400,
             f"{tmp_path}/loop", f"{tmp_path}/loop/x", f"{tmp_path}/to", "~", "", ".", "/dev/null/x",
             "~root/../\0"]  # fmt: skip
    return names


def test_paths_that_cannot_be_are_model_errors(
    odd: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Hub(tmp_path, []))
    for name in odd:
        for roots in (None, (tmp_path,), (tmp_path / "loop",)):
            path = existing(name, roots)
            if path is None or not path.is_dir():
                with pytest.raises(ModelError):
                    find_adapter(name, roots=roots)
        if existing(name) is None:
            with pytest.raises(ModelError):
                find_model(name)


def test_the_server_s_folder_tells_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A name that is a directory there is a hub id all the same, and so is one that is not."""
    hub = Hub(tmp_path / "fetched", [])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **options: Info(1))
    (tmp_path / "src").mkdir()
    (tmp_path / "root" / "own").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    roots = (tmp_path / "root",)
    assert find_adapter("src", roots=roots) == find_adapter("absent", roots=roots) == hub.folder
    assert find_adapter("root/own", roots=roots) == roots[0] / "own"
    said = set()
    for name in ("./src", "./absent", "../x", str(tmp_path), "/etc"):
        with pytest.raises(ModelError) as error:
            find_adapter(name, roots=roots)
        said.add(str(error.value).replace(repr(name), ""))
    assert len(said) == 1
    assert find_adapter("src") == tmp_path / "src"
    with pytest.raises(ModelError, match="--no-lora-hub-ids is set"):
        find_adapter("owner/name", roots=roots, ids=False)


class Info:
    def __init__(self, size: int) -> None:
        files = [
            ("adapter_model.safetensors", size),
            ("model.safetensors", 1 << 50),
            ("adapter_config.json", None),
        ]
        self.siblings = [SimpleNamespace(rfilename=name, size=held) for name, held in files]


def test_what_a_user_has_fetched_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = Hub(tmp_path, [])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **options: Info(MAX_ADAPTER + 1))
    with pytest.raises(ModelError, match=f"adapters of users have at most {MAX_ADAPTER}"):
        find_adapter("owner/name", roots=())
    assert not hub.calls
    find_adapter("owner/name")
    assert not hub.calls[0]["local_files_only"]

    def unreachable(*args: object, **options: object) -> None:
        raise httpx.ConnectError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    find_adapter("owner/name", roots=())
    assert hub.calls[1]["local_files_only"]


def test_no_model_is_not_the_working_directory() -> None:
    with pytest.raises(ModelError, match="no model given"):
        find_model("")


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="is a file; give a GGUF file, or the directory"):
        find_model(str(tmp_path / "model.safetensors"))


def test_only_needed_files_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = {
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "merges.txt",
        "model.safetensors.index.json",
    }
    weights = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    others = {
        "pytorch_model.bin",
        "consolidated.safetensors",
        "original/params.json",
        "onnx/model.onnx",
        "run.py",
    }
    hub = Hub(tmp_path, [*about, *weights, *others])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    assert find_model("owner/name", "v1", "cache") == tmp_path
    assert fetched(tmp_path) == about | weights
    (call,) = hub.calls
    assert (call["repo_id"], call["revision"], call["cache_dir"]) == ("owner/name", "v1", "cache")


def test_torch_weights_are_fetched_where_there_is_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(
        tmp_path,
        ["config.json", "pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json", "optimizer.bin"],
    )
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    find_model("owner/name")
    assert len(hub.calls) == 2
    assert fetched(tmp_path) == {
        "config.json",
        "pytorch_model-00001-of-00001.bin",
        "pytorch_model.bin.index.json",
    }


def test_a_tokenizer_is_fetched_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(tmp_path, ["config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin"])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    find_model("owner/name", weights=False)
    assert len(hub.calls) == 1
    assert fetched(tmp_path) == {"config.json", "tokenizer.json"}


def http(kind: type[Exception]) -> Exception:
    return kind("said the hub", response=httpx.Response(404, request=httpx.Request("GET", "http://hub")))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: http(errors.GatedRepoError), "owner/name is gated: accept its terms"),
        (lambda: http(errors.RepositoryNotFoundError), "not a directory here and not a model on the hub"),
        (lambda: http(errors.RevisionNotFoundError), "has no revision 'v9'"),
        (
            lambda: errors.LocalEntryNotFoundError("offline"),
            "not in the cache, and the hub cannot be reached: check the name",
        ),
        (lambda: errors.HFValidationError("bad"), "nor a valid Hugging Face id: bad"),
        (lambda: http(errors.HfHubHTTPError), "at revision v9 cannot be fetched"),
        (lambda: OSError(28, "No space left on device"), "cannot be fetched.*No space left"),
    ],
)
def test_failures_of_the_hub_say_what_to_do(make: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise make()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=message):
        find_model("owner/name", "v9")


def test_the_real_client_offline_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="not in the cache, and the hub cannot be reached"):
        find_model("owner/name", download_dir=str(tmp_path))


def test_a_gguf_file_is_itself_and_found_alone_in_a_directory(tmp_path: Path) -> None:
    (tmp_path / "model-Q8_0.gguf").touch()
    assert find_model(str(tmp_path / "model-Q8_0.gguf")) == tmp_path / "model-Q8_0.gguf"
    assert find_model(str(tmp_path)) == tmp_path / "model-Q8_0.gguf"
    (tmp_path / "config.json").touch()
    assert find_model(str(tmp_path)) == tmp_path


def test_an_id_with_a_colon_is_one_gguf_file_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parts = [f"m-Q4_K_M-0000{i}-of-00002.gguf" for i in (1, 2)]
    hub = Hub(tmp_path, ["m-Q8_0.gguf", "m-Q5_0.gguf", "m-Q5_0_L.gguf", *parts, "README.md"])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    assert find_model("owner/name:Q8_0") == tmp_path / "m-Q8_0.gguf"
    assert fetched(tmp_path) == {"m-Q8_0.gguf"}
    assert find_model("owner/name:Q4_K_M") == tmp_path / parts[0]
    assert hub.calls[0]["repo_id"] == "owner/name"
    with pytest.raises(ModelError, match=r"found m-Q5_0\.gguf, m-Q5_0_L\.gguf; name the file"):
        find_model("owner/name:Q5_0")
    with pytest.raises(ModelError, match="found none"):
        find_model("owner/name:Q2_K")
