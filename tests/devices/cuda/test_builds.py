"""`quire build --device cuda`: engine directories with compiled kernels, made where no GPU is."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

from quire import LLM, SamplingParams
from quire.build import build_engine
from quire.cli import main
from quire.config import EngineConfig
from quire.devices import selection
from quire.devices.artifacts import FOLDER, Artifacts
from quire.devices.cuda import cubins
from quire.devices.cuda.cubins import Built, Kernel, gpu_launcher
from quire.devices.cuda.target import TARGETS
from quire.devices.registry import make_backend
from quire.engine.plan import plan_engine
from quire.errors import ConfigError, ModelError, QuireError
from quire.model.info import EngineLimits
from tests.devices.cuda.drivers import FakeDriver
from tests.devices.cuda.test_engine import SMALL
from tests.models import load_model
from tests.serve.running import start
from tests.tiny import write_checkpoint

FEW: dict[str, Any] = {
    "device": "cuda",
    "max_num_batched_tokens": 8,
    "max_num_seqs": 2,
    "kv_cache_dtype": "fp8_e5m2",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), "llama", "bfloat16", **SMALL)


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("engines") / "engine"
    build_engine(EngineConfig.from_options(model=str(model), **FEW), made, target="sm_80")
    return made


def test_a_directory_holds_weights_and_compiled_kernels(model: Path, engine: Path) -> None:
    kept = Artifacts.opened(engine / FOLDER, "")
    about = kept.about(Built)
    assert (about.target, about.sources) == ("sm_80", cubins.sources())
    assert {path.name for path in (engine / FOLDER).iterdir()} == {
        "manifest.json", *(file.sha256 for file in kept.files.values())
    }  # fmt: skip
    names = set()
    for key in kept.files:
        kernel = kept.about(Kernel, key)
        code = kept.read(key)
        assert code.startswith(b"\x7fELF")
        assert kernel.name.encode() in code
        assert kernel.shared_bytes <= TARGETS["sm_80"].shared_bytes
        names.add(kernel.name)
    assert {"product", "norm", "attention", "rope_store", "sampled", "gather"} <= names
    assert any("*fp8e5" in key for key in kept.files)
    ours, theirs = (load_model(path, make_backend(device="interpreter")) for path in (engine, model))
    for path, weight in theirs.decoder.weights.items():
        one = ours.decoder.weights[path]
        pair = [w if isinstance(w, np.ndarray) else w.dequantize() for w in (one, weight)]
        np.testing.assert_array_equal(*pair)


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint and its directory for two ranks; of three heads they have one and two, so other shapes."""
    folder = tmp_path_factory.mktemp("divided")
    odd = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48, "num_hidden_layers": 1}
    model = write_checkpoint(folder / "model", "llama", "bfloat16", **{**SMALL, **odd})
    options = {"tensor_parallel_size": 2, **FEW, "max_num_batched_tokens": 2}
    build_engine(EngineConfig.from_options(model=str(model), **options), folder / "engine", target="sm_80")
    return model, folder / "engine"


def test_a_directory_for_ranks_holds_the_kernels_of_each(divided: tuple[Path, Path]) -> None:
    """Kernels of equal shapes are there once."""
    _, made = divided
    kept, names = Artifacts.opened(made / FOLDER, ""), Counter[str]()
    for key in kept.files:
        names[kept.about(Kernel, key).name] += 1
    assert names["add_parts"] >= 2  # gathered, and where they are
    assert names["publish"] == 2
    assert sum("RANKS=2" in key for key in kept.files if key.startswith("norm.")) >= 2
    with pytest.raises(ConfigError, match="was built for --tensor-parallel-size 2, and 4 is asked for"):
        plan_engine(EngineConfig.from_options(model=str(made), tensor_parallel_size=4, device="interpreter"))


RANKED: dict[str, Any] = {
    "device": "interpreter", "tensor_parallel_size": 2, "threads": 2, "max_model_len": 64, "block_size": 16,
    "num_gpu_blocks_override": 24,
}  # fmt: skip


def ranked_answer(path: Path) -> tuple[list[int], list[float]]:
    """Tokens of two ranks, and their log-probabilities."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
    with LLM(str(path), **RANKED) as llm:
        [sample] = llm.generate("Once upon a", params, use_tqdm=False)[0].outputs
    steps = zip(sample.token_ids, sample.logprobs or (), strict=True)
    return [*sample.token_ids], [step[token].logprob for token, step in steps]


def test_a_directory_for_ranks_is_served(divided: tuple[Path, Path]) -> None:
    """With the bits of the checkpoint on as many ranks, by a server and in Python."""
    model, made = divided
    wanted = ranked_answer(model)
    assert ranked_answer(made) == wanted
    server = start(maker="quire.client.start", model=str(made), **RANKED)
    try:
        asked = {
            "prompt": "Once upon a",
            "max_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 0,
        }
        [choice] = server.post("/v1/completions", {**asked, "return_token_ids": True}).json()["choices"]
    finally:
        server.stop()
    assert (choice["token_ids"], choice["logprobs"]["token_logprobs"]) == wanted


def test_python_gets_the_same_refusals_in_a_line(
    model: Path, divided: tuple[Path, Path], tmp_path: Path
) -> None:
    ours, theirs = Path(shutil.copytree(divided[1], tmp_path / "ours")), tmp_path / "theirs"
    (ours / "weights.1.bin").unlink()
    build_engine(EngineConfig.from_options(model=str(model), device="cpu", tensor_parallel_size=2), theirs)
    for path, message in (
        (ours, "rank 1 failed: .*weights.1.bin: cannot be read: No such file.*; run `quire build`"),
        (
            theirs,
            "was built for .*, and this is gpu layout 1: run `quire build` again, or choose isa or device",
        ),
    ):
        with pytest.raises(QuireError, match=message) as said:
            LLM(str(path), **RANKED)
        assert "\n" not in str(said.value)


def test_a_start_takes_the_directory_s_kernels(engine: Path) -> None:
    run = gpu_launcher(TARGETS["sm_80"], engine / FOLDER, FakeDriver())
    assert isinstance(run, cubins.CubinLauncher)
    with pytest.raises(
        ConfigError, match=f"{engine} was built for sm_80, and the GPU is sm_90: run `quire build"
    ):
        gpu_launcher(TARGETS["sm_90"], engine / FOLDER, FakeDriver())


def test_other_limits_keep_the_kernels(engine: Path, tmp_path: Path) -> None:
    build_engine(
        EngineConfig.from_options(model=str(engine)), tmp_path / "again", EngineLimits(max_batch_size=1)
    )
    kept = Artifacts.opened(tmp_path / "again" / FOLDER, "")
    assert [kept.read(key)[:4] for key in kept.files] == [b"\x7fELF"] * len(kept.files)


def test_a_directory_for_the_cpu_has_none(model: Path, tmp_path: Path) -> None:
    build_engine(EngineConfig.from_options(model=str(model), device="cpu"), tmp_path / "engine")
    assert not (tmp_path / "engine" / FOLDER).exists()


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit):
        main([*args])
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--target", "sm_90"], "--target sm_90 is a GPU's architecture: give --device cuda too"),
        (
            ["--target", "sm_90", "--device", "cpu"],
            "--target sm_90 is a GPU's architecture: give --device cuda too",
        ),
        (["--target", "sm_70", "--device", "cuda"], "--target must be one of sm_80, sm_86"),
        (["--target", "90", "--device", "cuda"], "--target must be one of sm_80, sm_86"),
        (["--target", "sm_90", "--device", "interpreter"], "--target sm_90 is a GPU's architecture"),
        (
            ["--device", "cuda", "--target", "sm_80", "--kv-cache-dtype", "fp8"],
            "sm_80 does not convert fp8_e4m3",
        ),
        (
            ["--device", "cpu", "--kv-cache-dtype", "fp8"],
            "--kv-cache-dtype sets what a GPU's kernels are compiled for",
        ),
        (["--device", "cpu", "--enable-lora"], "--enable-lora sets what a GPU's kernels are compiled for"),
    ],
)
def test_wrong_builds_are_refused_in_a_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    said = refusal(capsys, "build", str(model), "-o", str(tmp_path / "engine"), *args)
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "engine").exists()


def test_a_build_for_a_gpu_that_is_not_here_names_the_option(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, "build", str(model), "-o", str(tmp_path / "engine"), "--device", "cuda")
    assert "--target sm_90 builds for a GPU that is elsewhere" in said


def test_a_build_without_triton_says_what_to_install(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quire.lazy.missing", lambda *names: [name for name in names if name == "triton"])
    said = refusal(
        capsys, "build", str(model), "-o", str(tmp_path / "engine"), "--device", "cuda", "--target", "sm_90"
    )
    assert "quire build --device cuda needs triton: pip install triton" in said


def test_a_target_runs_no_model(model: Path) -> None:
    with pytest.raises(
        ConfigError, match="sm_90 is a target of `quire build`, and no device that runs a model"
    ):
        plan_engine(EngineConfig.from_options(model=str(model), device="sm_90"))
    with pytest.raises(ConfigError, match="--target must be one of"):
        make_backend(device="sm_70")


def test_a_directory_for_gpus_needs_one(engine: Path) -> None:
    with pytest.raises(
        ModelError, match=r"was built for gpu layout 1, and this is .*: run `quire build` again, or"
    ) as said:
        plan_engine(EngineConfig.from_options(model=str(engine), device="cpu"))
    assert "\n" not in str(said.value)
    with pytest.raises(ConfigError, match="--device cpu computes on the CPU"):
        plan_engine(EngineConfig.from_options(model=str(engine), device="cuda"))


def test_triton_may_lack_where_a_directory_has_the_kernels(
    engine: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "missing", lambda *names: [name for name in names if name == "triton"])
    monkeypatch.setattr(selection, "_index", lambda device: 0)
    monkeypatch.setattr(
        selection,
        "cuda",
        SimpleNamespace(CudaBackend=lambda device, choices, threads, artifacts, *others: artifacts),
    )
    monkeypatch.setattr(selection, "plain", SimpleNamespace(TorchBackend=lambda *args: "plain torch"))
    found: list[Any] = [make_backend(device="cuda", made=made) for made in (engine, model, None)]
    assert found == [engine / FOLDER, "plain torch", "plain torch"]
    other: Any = make_backend("torch", device="cuda", made=engine)
    assert other == "plain torch"
