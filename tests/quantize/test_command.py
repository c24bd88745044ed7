"""`quire quantize` and `quire bench quality --base` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.cli import main
from quire.engine.directory import ASSETS
from quire.quantize.methods import BITS, READERS
from quire.weights.checkpoint import open_checkpoint
from quire.weights.readers.planned import PlannedCheckpoint
from quire.weights.source import open_source
from tests.tiny import write_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    wide = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama", **wide)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The wind was tired and did not come. The boat was sad and waited. " * 30)
    return path


def read_by(method: str, group_size: int, text: Path) -> list[str]:
    """The options for groups and for a text, of those that the method reads."""
    groups = ["--group-size", str(group_size)] if method in READERS["group_size"] else []
    texts = ["--calibration", str(text), "--samples", "2", "--sample-len", "16"]
    return groups + (texts if method in READERS["samples"] else [])


def test_a_checkpoint_is_made_served_and_compared(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "small"
    options = ["--group-size", "32", "--calibration", str(text), "--samples", "4", "--sample-len", "32"]
    main(["quantize", str(model), "-o", str(output), "--method", "gptq", *options])
    assert "MB of" in capsys.readouterr().out
    config = json.loads((output / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["bits"], config["group_size"]) == ("gptq", 4, 32)
    params = SamplingParams(temperature=0, max_tokens=4)
    (found,) = LLM(str(output)).generate("The boat", params, use_tqdm=False)
    assert len(found.outputs[0].token_ids) == 4
    figures = tmp_path / "figures.json"
    command = ["bench", "quality", str(output), "--base", str(model), "--text", str(text), "--window", "32"]
    main([*command, "--max-tokens", "256", "--dtype", "float32", "--output-json", str(figures)])
    rows = figures.read_text()
    assert "kl_mean" in rows
    main(["bench", "quality", str(model), "--text", str(text), "--window", "32", "--max-tokens", "256"])


def test_the_text_of_the_package_is_used_with_a_warning(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = ["--method", "int8-static", "--samples", "2", "--sample-len", "16"]
    main(["quantize", str(model), "-o", str(tmp_path / "out"), *options])
    assert "a small text of Quire's own" in caplog.text
    assert len((ASSETS / "calibration.txt").read_text()) > 100_000


def test_squared_gradients_weigh_tables(model: Path, text: Path, tmp_path: Path) -> None:
    options = ["--method", "squeezellm", "--bits", "3", "--calibration", str(text), "--samples", "2"]
    for name, more in (("plain", []), ("fisher", ["--fisher"])):
        main(["quantize", str(model), "-o", str(tmp_path / name), "--sample-len", "16", *options, *more])
    one, other = (next((tmp_path / n).glob("model-00001*")).read_bytes() for n in ("plain", "fisher"))
    assert len(one) == len(other)
    assert one != other
    assert not list(tmp_path.glob(".*fisher*"))


@pytest.mark.parametrize("method", BITS)
def test_matrices_that_no_group_fits_stay_float(
    method: str, text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not those of 72 columns; the config names them, and both what is loaded and what is planned follow it."""
    source = write_checkpoint(tmp_path / "float", "llama", hidden_size=64, intermediate_size=72)
    options = read_by(method, 32, text)
    main(["quantize", str(source), "-o", str(tmp_path / "out"), "--method", method, *options])
    fits = method in ("smoothquant", "int8-static", "fp8")
    names = set(open_checkpoint(tmp_path / "out").names())
    floats = {f"model.layers.{i}.mlp.down_proj.weight" for i in range(3)}
    assert ("stay float: its 72 columns" in caplog.text) == (not fits)
    assert fits or floats <= names
    section = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert ("layers.0.mlp.down_proj" in json.dumps(section).replace("\\", "")) == (not fits)
    planned = PlannedCheckpoint(
        tmp_path,
        section["quant_method"],
        section,
        {name: (64, 72 if "down" in name else 64) for name in names},
    )
    model = open_source(tmp_path / "out").tensors()
    for name in floats:
        assert (model.layout(name) is None) or fits
        assert (planned.layout(name) is None) or fits
    (found,) = LLM(str(tmp_path / "out")).generate(
        "The boat", SamplingParams(temperature=0, max_tokens=2), use_tqdm=False
    )
    assert len(found.outputs[0].token_ids) == 2


@pytest.mark.parametrize("method", ["awq", "gptq", "rtn"])
def test_a_model_that_no_group_fits_is_refused(
    method: str, model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = read_by(method, 48, text)
    with pytest.raises(SystemExit):
        main(["quantize", str(model), "-o", str(tmp_path / "out"), "--method", method, *options])
    said = capsys.readouterr().err
    assert "tensor model.layers.0.self_attn.q_proj.weight cannot be quantized" in said
    assert "its 64 columns are not whole groups of 48; --group-size 64 or 32 or 16 divides them" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "name the directory to write"),
        (["-o", "X", "--method", "gptq", "--fisher"], "--fisher is for --method squeezellm"),
        (["-o", "X", "--method", "fp8", "--bits", "4"], "--bits 4: fp8 makes 8 bits"),
        (["-o", "X", "--method", "fp8", "--damp", "0.02"], "--damp is for --method gptq or squeezellm"),
        (["-o", "X", "--method", "nvfp4", "--group-size", "64"], "--group-size is for --method gptq or awq"),
        (["-o", "X", "--method", "awq", "--no-symmetric"], "--symmetric is for --method gptq or rtn"),
        (["-o", "X", "--method", "rtn", "--calibration", "SHORT"], "--calibration is for --method gptq or"),
        (["-o", "X", "--calibration", "SHORT"], "too short to calibrate with"),
    ],
)
def test_mistakes_are_named(
    options: list[str], message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short").write_text("Hi")
    places = {"X": str(tmp_path / "x"), "SHORT": str(tmp_path / "short")}
    with pytest.raises(SystemExit):
        main(["quantize", str(model), *(places.get(word, word) for word in options)])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_calibration_does_not_depend_on_threads(model: Path, text: Path, tmp_path: Path) -> None:
    options = ["--method", "awq", "--group-size", "32", "--calibration", str(text), "--samples", "2"]
    for threads in ("1", "2"):
        main(
            [
                "quantize",
                str(model),
                "-o",
                str(tmp_path / threads),
                "--sample-len",
                "16",
                "--threads",
                threads,
                *options,
            ]
        )
    for path in (tmp_path / "1").glob("*.safetensors"):
        first, second = (np.frombuffer((tmp_path / t / path.name).read_bytes(), np.uint8) for t in ("1", "2"))
        assert np.array_equal(first, second)
