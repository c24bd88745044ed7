"""Engine directories: equal to their checkpoint, and refused wherever they could not be."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.build import build_engine
from quire.cli import main
from quire.config import EngineConfig
from quire.engine.directory import ASSETS, SHIPPED_MODEL
from quire.engine.plan import plan_engine
from quire.errors import ConfigError, ModelError, QuireError, RequestError
from quire.model.engine_dir import read_manifest
from quire.model.info import EngineLimits
from quire.text.tokenizer import Tokenizer
from tests.tiny import CONFIG, write_checkpoint

PROMPTS = ["Once upon a time", "The little dog said", "One day"]


def build(model: Path, output: Path, limits: EngineLimits | None = None, **options: Any) -> Path:
    build_engine(EngineConfig.from_options(model=str(model), **options), output, limits or EngineLimits())
    return output


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ASSETS / SHIPPED_MODEL, tmp_path_factory.mktemp("engines") / "stories")


@pytest.fixture
def copy(engine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(engine, tmp_path / "copy"))


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "float32"}, {"isa": "scalar"}, {"backend": "reference"}, {"backend": "torch"}]
)
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2_moe", "deepseek_v3", "gpt_oss", "bloom"])
def test_an_engine_writes_what_its_checkpoint_writes(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    if options.get("backend") == "torch":
        pytest.importorskip("torch", reason="--backend torch needs PyTorch")
    checkpoint = write_checkpoint(
        tmp_path / "model", family, "bfloat16", tie_word_embeddings=family == "qwen3"
    )
    built = build(checkpoint, tmp_path / "engine", **options)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, logprobs=5)
    serving = {name: value for name, value in options.items() if name != "dtype"}
    both = [
        LLM(str(model), **given).generate(PROMPTS, params, use_tqdm=False)
        for model, given in ((checkpoint, options), (built, serving))
    ]
    for ours, theirs in zip(*both, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert ours.outputs[0].logprobs == theirs.outputs[0].logprobs


def test_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    sizes = []
    for tied in (True, False):
        model = write_checkpoint(tmp_path / f"model-{tied}", tie_word_embeddings=tied)
        sizes.append(read_manifest(build(model, tmp_path / f"engine-{tied}")).size)
    assert sizes[1] - sizes[0] >= CONFIG["vocab_size"] * CONFIG["hidden_size"] * 4


def test_an_engine_for_two_ranks_has_a_file_for_each(tmp_path: Path) -> None:
    model, engine = write_checkpoint(tmp_path / "model", "qwen2_moe", "bfloat16"), tmp_path / "engine"
    build(model, engine, tensor_parallel_size=2, quantization="int8")
    assert {path.name for path in engine.glob("*weights*")} == {"weights.bin", "weights.1.bin"}
    assert [read_manifest(engine, rank).ranks for rank in (0, 1)] == [2, 2]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, logprobs=2)
    found = []
    for served, options in (
        (model, {"quantization": "int8", "tensor_parallel_size": 2}),
        (engine, {}),
        (engine, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    ):
        with LLM(str(served), **options) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    assert found[0] == found[1] == found[2]
    with pytest.raises(ConfigError, match="was built for tensor_parallel_size 2"):
        LLM(str(engine), tensor_parallel_size=4)
    main(["inspect", str(engine)])
    flip("weights.1.bin", 5000)(engine)
    with pytest.raises(SystemExit):
        main(["inspect", str(engine)])
    with pytest.raises(QuireError, match=r"weights.1.bin: bytes after .* were altered"):
        LLM(str(engine), tensor_parallel_size=2)


def test_the_tokenizer_is_the_same(engine: Path) -> None:
    theirs, ours = Tokenizer.load(ASSETS / SHIPPED_MODEL), Tokenizer.load(engine)
    for text in ("Once upon a time", " naïve  café\n\t— 日本 🙂", "<|im_start|>user"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert ours.chat_template == theirs.chat_template


def test_limits_hold(tmp_path: Path) -> None:
    limits = EngineLimits(max_batch_size=3, max_input_len=8, max_seq_len=40)
    engine = build(write_checkpoint(tmp_path / "model"), tmp_path / "engine", limits)
    llm = LLM(str(engine))
    assert llm.generate([[5] * 8] * 7, SamplingParams(max_tokens=32), use_tqdm=False)
    with pytest.raises(RequestError, match="maximum context length is 8 tokens of prompt"):
        llm.generate([[5] * 9], SamplingParams(max_tokens=1), use_tqdm=False)
    (longest,) = llm.generate([[5] * 8], SamplingParams(max_tokens=99, ignore_eos=True), use_tqdm=False)
    assert len(longest.outputs[0].token_ids) == 32
    assert plan_engine(EngineConfig.from_options(model=str(engine))).limits.max_seqs == 3
    with pytest.raises(ConfigError, match="40 positions this engine was built for"):
        LLM(str(engine), max_model_len=41)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (EngineLimits(max_seq_len=4096), "more than the 1024"),
        (EngineLimits(max_seq_len=9, max_input_len=9), "no room"),
    ],
)
def test_limits_that_cannot_be_are_refused(limits: EngineLimits, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        build(ASSETS / SHIPPED_MODEL, tmp_path / "engine", limits)
    assert not (tmp_path / "engine").exists()


def cut(engine: Path) -> None:
    path = engine / "weights.bin"
    path.write_bytes(path.read_bytes()[:-1])


def flip(name: str, place: int) -> Callable[[Path], None]:
    def damage(engine: Path) -> None:
        content = bytearray((engine / name).read_bytes())
        content[place] ^= 1
        (engine / name).write_bytes(content)

    return damage


def edit(**changes: Any) -> Callable[[Path], None]:
    def damage(engine: Path) -> None:
        path = engine / "engine.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, "cut off or altered"),
        (flip("weights.bin", 12345), "were altered"),
        (flip("weights.bin", -1), "were altered"),
        (flip("engine.json", 4000), "altered|not an engine's manifest"),
        (edit(format=99), "format 99, this version of Quire reads 12"),
        (edit(engine={}), "altered"),
        (edit(checksum=3), "not an engine's manifest"),
        (lambda engine: (engine / "weights.bin").unlink(), "cannot be read"),
        (lambda engine: (engine / "engine.json").write_bytes(b"\xff\x00"), "not an engine's manifest"),
    ],
)
def test_damage_is_found(damage: Callable[[Path], None], said: str, copy: Path) -> None:
    damage(copy)
    with pytest.raises(ModelError, match=said) as error:
        LLM(str(copy))
    assert "quire build" in str(error.value)


def test_another_instruction_set_is_refused(engine: Path) -> None:
    with pytest.raises(ModelError, match=r"built for .* and this is .* scalar.*quire build"):
        LLM(str(engine), isa="scalar")


def test_another_type_is_refused(engine: Path) -> None:
    with pytest.raises(ModelError, match="built in bfloat16"):
        LLM(str(engine), dtype="float32")


def test_what_is_in_the_way_stays(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="something other than an engine"):
        build(ASSETS / SHIPPED_MODEL, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_engine_gets_other_limits(copy: Path, tmp_path: Path) -> None:
    build(copy, tmp_path / "less", EngineLimits(max_batch_size=4, max_seq_len=64))
    build(tmp_path / "less", tmp_path / "less", EngineLimits(max_seq_len=128))
    limits = read_manifest(tmp_path / "less").limits
    assert (limits.max_batch_size, limits.max_seq_len) == (4, 128)
    assert os.path.samefile(copy / "weights.bin", tmp_path / "less" / "weights.bin")
    assert read_manifest(copy).limits == EngineLimits()
    shutil.rmtree(copy)
    with LLM(str(tmp_path / "less")) as llm:
        assert llm.max_model_len == 128
        assert llm.generate("One day", SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].text


def test_an_engine_keeps_its_weights(engine: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="built in bfloat16"):
        build(engine, tmp_path / "again", dtype="float32")
    with pytest.raises(ConfigError, match="more than the 1024"):
        build(engine, tmp_path / "again", EngineLimits(max_seq_len=4096))
    assert not (tmp_path / "again").exists()


def test_an_engine_is_replaced_whole(copy: Path) -> None:
    build(ASSETS / SHIPPED_MODEL, copy, EngineLimits(max_seq_len=64))
    assert read_manifest(copy).limits.max_seq_len == 64
    assert [path.name for path in copy.parent.iterdir()] == ["copy"]


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, output = write_checkpoint(tmp_path / "model"), tmp_path / "engine"
    main(["build", str(model), "-o", str(output), "--max-batch-size", "4"])
    assert "max_batch_size" in capsys.readouterr().out
    main(["inspect", str(output), "--json"])
    figures = json.loads(capsys.readouterr().out)
    assert figures["limits"]["max_batch_size"] == 4
    assert figures["bytes_by_layout"]["float32"] > 0
    main(["plan", str(output), "--json"])
    assert json.loads(capsys.readouterr().out)["parameters"] == figures["parameters"]
    flip("weights.bin", 4096)(output)
    for arguments, status in (
        (["inspect", str(output)], 1),
        (["inspect", str(tmp_path)], 1),
        (["build", str(model)], 2),
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == status
    errors = capsys.readouterr().err
    main(["inspect"])
    assert "quire-stories" in capsys.readouterr().out
    assert "were altered" in errors
    assert "no config.json" in errors
    assert "-o DIR" in errors


def test_inspect_says_what_a_recurrent_state_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, engine = write_checkpoint(tmp_path / "model", "lfm2"), tmp_path / "engine"
    main(["build", str(model), "-o", str(engine)])
    for path in (model, engine, model / "config.json"):
        capsys.readouterr()
        main(["inspect", str(path), "--json"])
        kept = 2 * 2 * 48 * 4  # two layers, two rows of 48 channels
        assert json.loads(capsys.readouterr().out)["state_bytes_per_sequence"] == kept
        main(["inspect", str(path)])
        assert f"state bytes per sequence {kept}" in " ".join(
            capsys.readouterr().out.replace("│", "").split()
        )
