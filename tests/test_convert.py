"""Converted checkpoints: a rank's share of them packs to the same bytes as its share of the checkpoint."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.build import build_engine
from quire.cli import main
from quire.config import EngineConfig
from quire.convert import convert_checkpoint
from quire.devices.cpu.backend import NativeBackend
from quire.engine.directory import load_tokenizer
from quire.engine.stages import share_of
from quire.errors import ConfigError, ModelError
from quire.model.converted import StoredPiece
from quire.model.engine_dir import MANIFEST, StoredTensor, Writer, read_manifest
from quire.model.info import NOTHING, Asked, AskedDtype, EngineLimits
from quire.model.load import open_files, open_for_reading
from quire.model.loaded import LoadedModel
from quire.model.shard import Shard
from quire.weights.schemes import Quantization, scheme
from tests.engine_files import rewrite, rewrite_weights
from tests.models import inspect_model, load_model
from tests.shared import DATA, require
from tests.tiny import CHOOSING, FAMILIES, INDEXED, OTHERS, RECURRENT, STREAMS, write_checkpoint

QUANTIZED = DATA / "quantized"


def convert(model: Path, output: Path, ranks: int = 1, **options: Any) -> Path:
    config = EngineConfig.from_options(model=str(model), tensor_parallel_size=ranks, **options)
    convert_checkpoint(config, output)
    return output


def packed(model: LoadedModel, backend: NativeBackend) -> tuple[bytes, dict[str, StoredTensor]]:
    """The weights as an engine holds them: their bytes, and their places by path."""
    file = io.BytesIO()
    writer = Writer(file)
    for path, tensor in model.decoder.weights.items():
        if path == "head" and tensor is model.decoder.weights.get("embedding"):
            writer.tensors[path] = writer.tensors["embedding"]
        elif isinstance(tensor, np.ndarray):
            writer.write({path: tensor})
        else:
            writer.add(path, *backend.export(tensor))
    return file.getvalue(), writer.tensors


def assert_same(model: Path, ranks: int, tmp_path: Path, **options: Any) -> Path:
    """Convert, and compare each rank's share, packed."""
    found, backend = convert(model, tmp_path / f"for-{ranks}", ranks, **options), NativeBackend(threads=1)
    quantized = scheme(options["quantization"], rounds=True) if "quantization" in options else None
    parallel = EngineConfig.from_options(tensor_parallel_size=ranks).parallel
    for rank in range(ranks):
        shard = share_of(parallel, rank, inspect_model(model, options.get("dtype", "auto"), quantized))
        wanted = load_model(model, backend, options.get("dtype", "auto"), quantized, shard=shard)
        mine = load_model(found, backend, shard=shard)
        assert packed(mine, backend) == packed(wanted, backend)
        names = wanted.names if wanted.family is None else wanted.family()
        assert (mine.spec, mine.names, mine.dtype) == (wanted.spec, names, wanted.dtype)
        assert (mine.info.eos_token_ids, mine.info.quantized) == (
            wanted.info.eos_token_ids,
            wanted.info.quantized,
        )
        outlines = [
            open_files(path, asked).outline(backend.outline(), shard)
            for path, asked in ((found, NOTHING), (model, Asked(options.get("dtype", "auto"), quantized)))
        ]
        assert outlines[0].weight_bytes == outlines[1].weight_bytes
    return found


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS, *RECURRENT, *CHOOSING, *STREAMS, *INDEXED])
def test_every_family_packs_to_the_same_bytes(family: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", family, "bfloat16")
    spec = inspect_model(model).spec
    assert_same(model, 1, tmp_path)
    try:
        spec.check_share(Shard(0, 2))  # type: ignore[attr-defined]
    except ConfigError:
        with pytest.raises(ConfigError, match="tensor-parallel-size 2"):
            convert(model, tmp_path / "refused", 2)
        return
    assert_same(model, 2, tmp_path)


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "fp8"}]
)
def test_types_are_those_of_the_conversion(options: dict[str, Any], tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", tie_word_embeddings=True)
    for ranks in (1, 4):
        assert_same(model, ranks, tmp_path, **options)


@pytest.mark.parametrize(
    "name",
    ["awq-gemm-g32", "gptq-4bit-g32-desc-act", "fp8-block-moe", "hqq-4bit-g64", "modelopt-nvfp4"]
    + ["squeezellm-4bit-sparse", "modelopt-fp8-kv", "ct-int8-w8a8-static"],
)
def test_codes_are_kept(name: str, tmp_path: Path) -> None:
    folder = require(QUANTIZED / name)
    found = assert_same(folder, 1, tmp_path)
    assert_same(folder, 2, tmp_path)
    assert inspect_model(found).kv_scales == inspect_model(folder).kv_scales
    assert any(tensor.about["layout"] == "codes" for tensor in read_manifest(found).tensors.values())


@pytest.mark.parametrize("name", ["llama-Q4_K_M.gguf", "llama-BF16.gguf"])
def test_a_gguf_file_is_divided(name: str, tmp_path: Path) -> None:
    path = require(DATA / "gguf-llamacpp" / name)
    found = assert_same(path, 2, tmp_path)
    ours, theirs = (load_tokenizer(EngineConfig.from_options(model=str(m)).model) for m in (found, path))
    assert ours.encode("a b") == theirs.encode("a b")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("converted") / "model")


@pytest.fixture(scope="module")
def converted(model: Path) -> Path:
    return convert(model, model.parent / "two", 2)


def test_a_build_from_it_writes_what_the_checkpoint_writes(model: Path, tmp_path: Path) -> None:
    one = convert(model, tmp_path / "one")
    build_engine(EngineConfig.from_options(model=str(one)), tmp_path / "engine")
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, logprobs=3)
    answers = []
    for path in (model, one, tmp_path / "engine"):
        with LLM(str(path)) as llm:
            (output,) = llm.generate(["Once upon a time"], params, use_tqdm=False)
            answers.append((output.outputs[0].text, output.outputs[0].logprobs))
    assert answers[0] == answers[1] == answers[2]


def test_two_ranks_serve_it_and_an_engine_of_it(model: Path, converted: Path, tmp_path: Path) -> None:
    """As many ranks as the files are for run without an option."""
    engine, less = tmp_path / "engine", tmp_path / "less"
    build_engine(EngineConfig.from_options(model=str(converted)), engine, EngineLimits(max_seq_len=64))
    build_engine(EngineConfig.from_options(model=str(engine)), less, EngineLimits(max_batch_size=4))
    params, texts = SamplingParams(temperature=0, max_tokens=8), []
    for path, ranks in ((model, 2), (converted, 1), (less, 1)):
        with LLM(str(path), tensor_parallel_size=ranks) as llm:
            texts.append(llm.generate(["One day"], params, use_tqdm=False)[0].outputs[0].text)
    assert texts[0] == texts[1] == texts[2]
    assert llm.max_model_len == 64
    manifest = read_manifest(less)
    assert (manifest.ranks, manifest.limits) == (2, EngineLimits(max_batch_size=4, max_seq_len=64))


def test_another_number_of_ranks_is_refused(converted: Path) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 2, and 3 is asked for: give 2"):
        LLM(str(converted), tensor_parallel_size=3)


def test_ranks_may_be_written_one_by_one(model: Path, converted: Path, tmp_path: Path) -> None:
    config = EngineConfig.from_options(model=str(model), tensor_parallel_size=2)
    convert_checkpoint(config, tmp_path / "parts", ranks=[1])
    with pytest.raises(ModelError, match=r"engine\.json"):
        load_model(tmp_path / "parts", NativeBackend(threads=1), shard=Shard(0, 2))
    convert_checkpoint(config, tmp_path / "parts", ranks=[0])
    for name in (MANIFEST, "engine.1.json", "weights.bin", "weights.1.bin"):
        assert (tmp_path / "parts" / name).read_bytes() == (converted / name).read_bytes()
    with pytest.raises(ConfigError, match="no rank 2 of 2"):
        convert_checkpoint(config, tmp_path / "parts", ranks=[2])


def test_a_conversion_is_replaced_and_other_content_is_not(
    model: Path, converted: Path, tmp_path: Path
) -> None:
    again = Path(shutil.copytree(converted, tmp_path / "again"))
    convert(model, again)
    assert read_manifest(again).ranks == 1
    assert not list(again.glob("*.1.*"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="something other than an engine"):
        convert(model, tmp_path / "other")


def test_it_is_no_checkpoint_to_convert_or_quantize(converted: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="give the checkpoint that it was made of"):
        convert(converted, tmp_path / "twice")
    with pytest.raises(ModelError, match="give the checkpoint that it was made of"):
        open_for_reading(converted)
    with pytest.raises(ModelError, match="give architecture, hf_overrides"):
        LLM(str(converted), tensor_parallel_size=2, hf_overrides={"rope_theta": 5e5})


def test_the_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["convert", str(model), "-o", str(tmp_path / "out"), "-tp", "2"])
    assert "LlamaForCausalLM for 2 ranks" in capsys.readouterr().out
    main(["inspect", str(tmp_path / "out"), "--json"])
    assert json.loads(capsys.readouterr().out)["ranks"] == 2
    assert load_tokenizer(EngineConfig.from_options(model=str(tmp_path / "out")).model).encode("a")
    with pytest.raises(SystemExit):
        main(["convert", str(model)])
    assert "quire convert MODEL -o DIR" in capsys.readouterr().err


def test_conversions_of_older_versions_are_made_again(model: Path, tmp_path: Path) -> None:
    old = Path(shutil.copytree(model, tmp_path / "old"))
    (old / "checkpoint.json").write_text("{}")
    (old / "rank0.safetensors").write_text("")
    with pytest.raises(ModelError, match="older version of Quire: run `quire convert` again"):
        LLM(str(old))
    convert(model, old)
    load_model(old, NativeBackend(threads=1)).wait()
    assert not (old / "checkpoint.json").exists()
    assert not (old / "rank0.safetensors").exists()


def test_damage_is_found(model: Path, tmp_path: Path) -> None:
    found = convert(model, tmp_path / "converted")
    data = bytearray((found / "weights.bin").read_bytes())
    data[4] ^= 1
    (found / "weights.bin").write_bytes(data)
    with pytest.raises(ModelError, match="were altered"):
        load_model(found, NativeBackend(threads=1)).wait()


def test_other_types_may_be_asked_for(model: Path, tmp_path: Path) -> None:
    found, backend = convert(model, tmp_path / "converted"), NativeBackend(threads=1)
    kinds: tuple[tuple[AskedDtype, Quantization | None], ...] = (
        ("bfloat16", None),
        ("auto", scheme("int8", rounds=True)),
    )
    for dtype, rounded in kinds:
        mine, wanted = (load_model(path, backend, dtype, rounded) for path in (found, model))
        assert packed(mine, backend) == packed(wanted, backend)


def test_a_pipeline_stage_packs_its_layers(model: Path, tmp_path: Path) -> None:
    found, backend = convert(model, tmp_path / "converted"), NativeBackend(threads=1)
    for stage in range(2):
        shard = Shard(stage=stage, stages=2)
        mine, wanted = (load_model(path, backend, shard=shard) for path in (found, model))
        assert packed(mine, backend) == packed(wanted, backend)


def about(manifest: dict[str, Any]) -> dict[str, Any]:
    """The description of a matrix."""
    found: dict[str, Any] = manifest["tensors"]["layers.0.attention.q.weight"]["about"]
    return found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.update(ranks=0), "not an engine's manifest"),
        (lambda m: m.update(more=1), "not an engine's manifest"),
        (lambda m: m["names"].update(layer="model.layers.{i:999999999}."), "layer cannot be"),
        (lambda m: m["names"].update(layer="{i.__class__}"), "layer cannot be"),
        (lambda m: m["names"]["modules"].update(spread="{s.__class__}"), "spread cannot be"),
        (lambda m: m["names"].update(sublayers=1 << 40), "sublayers must be"),
        (
            lambda m: m["spec"]["layers"].append(m["spec"]["layers"][0]),
            "there is no tensor layers.3",
        ),
        (lambda m: m["spec"]["layers"][0]["mlp"].update(intermediate_size=64), "the model says"),
        (lambda m: m["spec"].update(layers=[]), "from 1 to 1024 layers"),
        (lambda m: m.update(eos_token_ids=[1 << 20]), "eos_token_ids"),
        (lambda m: m.update(kv_scales=[None]), "kv_scales has 1 entries for 3 layers"),
        (
            lambda m: m.update(kv_scales=[None, None, {"keys": [1], "values": [1, -1]}]),
            "kv_scales of layer 2",
        ),
        (lambda m: about(m).update(codes={"type": "blocks", "kind": "no"}, layout="codes"), "no layout"),
        (
            lambda m: about(m).update(
                codes={"type": "blocks", "kind": "lut4", "entries": 1 << 60}, layout="codes"
            ),
            "no layout",
        ),
        (lambda m: about(m).update(codes={"type": "int4", "group_size": 3}, layout="codes"), "no layout"),
        (lambda m: about(m).update(layout="codes"), "no layout"),
        (lambda m: about(m).update(layout="float64"), "not the description of a piece"),
        (lambda m: about(m).update(more=1), "not the description of a piece"),
        (lambda m: m["tensors"].pop("norm.weight"), "there is no tensor norm.weight"),
        (lambda m: m["tensors"].update(more=m["tensors"]["norm.weight"]), "nothing reads more"),
        (lambda m: m["tensors"]["norm.weight"].update(nbytes=64), "its layout says"),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(
    change: Callable[[dict[str, Any]], None], said: str, converted: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(converted, tmp_path / "copy"))
    rewrite(copy, change)
    with pytest.raises(ModelError, match=said):
        load_model(copy, NativeBackend(threads=1), shard=Shard(0, 2))


def quantized(manifest: dict[str, Any]) -> dict[str, Any]:
    """A quantized tensor, with the most sparse entries."""
    found = [t for t in manifest["tensors"].values() if t["about"]["layout"] == "codes"]
    return max(found, key=lambda tensor: tensor["about"].get("entries", 0))


def fill(place: int, value: int) -> Callable[[bytearray, dict[str, Any]], None]:
    """Set all bytes of one array of a quantized tensor."""

    def change(data: bytearray, manifest: dict[str, Any]) -> None:
        tensor = quantized(manifest)
        sizes = [array.nbytes for array in msgspec.convert(tensor["about"], StoredPiece).outline()]
        begin = tensor["offset"] + sum(sizes[:place])
        data[begin : begin + sizes[place]] = bytes([value]) * sizes[place]

    return change


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("gptq-4bit-g32-desc-act", fill(-1, 99), "above 15"),
        ("gptq-4bit-g32-desc-act", fill(-3, 0), "are not an order"),
        ("squeezellm-4bit-sparse", fill(-4, 1), "does not ascend"),
        ("squeezellm-4bit-sparse", fill(-3, 100), "holds a column outside"),
    ],
)
def test_quantized_parts_that_cannot_be_are_refused(
    name: str, change: Callable[[bytearray, dict[str, Any]], None], said: str, tmp_path: Path
) -> None:
    found = convert(require(QUANTIZED / name), tmp_path / "converted")
    rewrite_weights(found, change)
    with pytest.raises(ModelError, match=said):
        load_model(found, NativeBackend(threads=1))


@pytest.mark.parametrize("change", [{"nbytes": 4096}, {"entries": 3}, {"shape": [1 << 40, 1 << 40]}])
def test_quantized_parts_of_another_size_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    found = convert(require(QUANTIZED / "squeezellm-4bit-sparse"), tmp_path / "converted")

    def changed(manifest: dict[str, Any]) -> None:
        tensor = quantized(manifest)
        (tensor if "nbytes" in change else tensor["about"]).update(change)

    rewrite(found, changed)
    with pytest.raises(ModelError, match=r"its layout says|the model says"):
        load_model(found, NativeBackend(threads=1))
