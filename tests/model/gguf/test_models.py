"""Whole models out of GGUF files: the same tokens as from the checkpoint that they were made of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire import LLM, LoRARequest, SamplingParams
from quire.build import build_engine
from quire.config import EngineConfig
from quire.devices.cpu.backend import NativeBackend
from quire.devices.cpu.pack import describe
from quire.engine.source import find_files
from quire.errors import ConfigError, ModelError, UnknownArchitectureError
from quire.model.cost import matrices
from quire.model.gguf import read_gguf
from quire.model.gguf.adapted import by_family_names, family_names
from quire.model.info import EngineLimits, Reading
from quire.model.load import open_checkpoint_files
from quire.model.parts.rope import RopeSpec
from quire.weights.gguf.kinds import KINDS
from quire.weights.hub import open_tokenizer
from tests.adapter_files import write_adapter
from tests.gguf_files import add_config, add_tokenizer, finish, write_gguf
from tests.models import inspect_model
from tests.tiny import BOS, CONFIG, EOS, write_checkpoint

Made = Callable[..., tuple[str, str]]
TEXTS = ["Once upon a time the cat", "on the <|user|> mat 123", "naïve ☃ text, the end"]
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 64,
    "max_model_len": 96,
    "threads": 1,
}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """(directory of the checkpoint, GGUF file), made once for each set of arguments."""
    known: dict[str, tuple[str, str]] = {}

    def make(family: str = "llama", kind: str = "F32", **config: Any) -> tuple[str, str]:
        key = repr((family, kind, sorted(config.items())))
        if key not in known:
            folder = tmp_path_factory.mktemp("gguf")
            dtype = "bfloat16" if kind == "BF16" else "float32"
            directory = write_checkpoint(folder / "model", family, dtype, **config)
            known[key] = str(directory), str(write_gguf(directory, folder / "model.gguf", family, kind))
        return known[key]

    return make


def run(model: str, **options: Any) -> list[Any]:
    outputs = LLM(model, **{**OPTIONS, **options}).generate(TEXTS, GREEDY, use_tqdm=False)
    return [
        (output.prompt_token_ids, output.outputs[0].token_ids, output.outputs[0].cumulative_logprob)
        for output in outputs
    ]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_tokens_and_logprobs_equal_those_of_the_checkpoint(family: str, kind: str, made: Made) -> None:
    directory, file = made(family, kind)
    assert run(file) == run(directory)


def test_a_tied_head_and_float16(made: Made, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", "qwen2", tie_word_embeddings=True)
    file = write_gguf(directory, tmp_path / "model.gguf", "qwen2", "F16")
    halved = _rounded(directory, tmp_path / "halved", np.float16)
    assert run(str(file)) == run(str(halved))


def _rounded(source: Path, target: Path, kind: Any) -> Path:
    """The checkpoint with its matrices rounded to another type."""
    target.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    tensors = load_file(source / "model.safetensors")
    save_file(
        {n: t.astype(kind) if t.ndim > 1 else t for n, t in tensors.items()}, target / "model.safetensors"
    )
    return target


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_files_equal_what_their_values_give(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    directory = write_checkpoint(tmp_path / "model", "llama", **sizes)
    file = write_gguf(directory, tmp_path / "model.gguf", "llama", kind)
    model = read_gguf(file)
    names = family_names(model.spec)
    tensors = by_family_names(model.spec, names, model.names, model.checkpoint)
    original = load_file(directory / "model.safetensors")
    values = {name: tensors.get(name) if data.ndim > 1 else data for name, data in original.items()}
    save_file(values, directory / "model.safetensors")
    # The same values as float32 weights, and as blocks times float activations, which sum in another order.
    wanted = run(str(directory))
    assert run(str(file), dtype="float32") == wanted
    for ours, theirs in zip(run(str(file), quantization_activations="float"), wanted, strict=True):
        assert ours[:2] == theirs[:2]
        assert ours[2] == pytest.approx(theirs[2], abs=1e-3)
    # Rounded activations, by blocks on every backend.
    for ours, theirs in zip(run(str(file)), run(str(file), backend="reference"), strict=True):
        assert ours[:2] == theirs[:2]
        assert ours[2] == pytest.approx(theirs[2], abs=0.2)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_files_are_served_and_planned_in_their_own_types(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    directory = write_checkpoint(tmp_path / "model", "llama", **sizes)
    file = write_gguf(directory, tmp_path / "model.gguf", "llama", kind)
    choices: tuple[dict[str, Any], ...] = (
        {},
        {"quantization_activations": "float"},
        {"quantization": "int4"},
    )
    for options in choices:
        config = EngineConfig.from_options(model=str(file), **options)
        backend = NativeBackend(2)
        planned, real = (
            find_files(config.model).outline(backend.outline()),
            find_files(config.model).load(backend),
        )
        assert planned.weight_bytes == real.weight_bytes
        weights = matrices(real.decoder.weights)  # type: ignore[attr-defined]
        downs = [weights[path] for path in weights if path.endswith(".mlp.down")]
        about = describe(downs[0].packed)  # type: ignore[attr-defined]
        if options.get("quantization") == "int4":  # asked for: the values are rounded again
            assert about["layout"] == "int4"
            continue
        for matrix in (weights["embedding"], *downs):
            about = describe(matrix.packed)  # type: ignore[attr-defined]
            kinds = [name for name, _ in about["blocks"]]
            assert (about["layout"], kinds) == ("blocks", [kind.lower()])
            assert about["int8_rows"] == ("quantization_activations" not in options)
            rows, columns = matrix.shape
            block = next(k for k in KINDS.values() if k.name == kind)
            assert matrix.nbytes == rows * columns // block.block * block.nbytes


def test_everything_comes_from_the_file(made: Made) -> None:
    directory, file = made()
    ours, theirs = open_tokenizer(Path(file)), open_tokenizer(Path(directory))
    assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text) for text in TEXTS]
    assert ours.chat_template == theirs.chat_template
    assert ours.eos_token_ids[0] == theirs.eos_token_id == EOS
    assert ours.special_tokens == theirs.special_tokens
    info = inspect_model(file)
    assert info.spec == inspect_model(directory).spec
    assert info.eos_token_ids[0] == EOS
    (answer,) = LLM(file, **OPTIONS).chat([{"role": "user", "content": "the cat"}], GREEDY, use_tqdm=False)
    (expected,) = LLM(directory, **OPTIONS).chat(
        [{"role": "user", "content": "the cat"}], GREEDY, use_tqdm=False
    )
    assert answer.outputs[0].token_ids == expected.outputs[0].token_ids


def test_sampling_defaults_come_from_the_file(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model")
    extra = {"general.sampling.temp": 0.25, "general.sampling.top_k": 7}
    llm = LLM(str(write_gguf(directory, tmp_path / "m.gguf", extra=extra)), **OPTIONS)
    assert (llm.default_params().temperature, llm.default_params().top_k) == (0.25, 7)


def test_towers_for_pictures_and_sound_are_left_out(made: Made, tmp_path: Path) -> None:
    """Files of one part, as Ollama keeps them, hold the towers beside the text model."""
    directory = write_checkpoint(tmp_path / "model")
    extra = {"llama.vision.block_count": 2, "llama.mm.tokens_per_image": 256, "llama.audio.block_count": 1}
    towers = {
        name: np.ones((4, 4), np.float32)
        for name in ("v.blk.0.attn_q.weight", "mm.0.weight", "a.position_embd.weight")
    }
    file = write_gguf(directory, tmp_path / "m.gguf", extra=extra, tensors=towers)
    assert run(str(file)) == run(str(directory))


def test_parts_are_one_model(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model")
    write_gguf(directory, tmp_path / "m.gguf", split=10)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) > 2
    assert run(str(parts[0])) == run(str(directory))
    with pytest.raises(ModelError, match="give the first one"):
        inspect_model(parts[1])
    parts[1].unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        inspect_model(parts[0])


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.attention.clamp_kqv": 3.0}, "clamp_kqv = 3.0 is not understood"),
        ({"llama.rope.scaling.type": "spiral"}, "rope.scaling.type must be"),
        ({"llama.expert_count": 4, "llama.expert_used_count": 2}, "MixtralForCausalLM|missing"),
        ({"llama.rope.scaling.original_context_length": 0}, "original_context_length must be an integer above 0"),
    ],
)  # fmt: skip
def test_what_would_change_the_maths_is_refused(extra: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = write_gguf(write_checkpoint(tmp_path / "model"), tmp_path / "m.gguf", extra=extra)
    with pytest.raises(ModelError, match=message):
        inspect_model(file)


def test_unknown_architectures_and_transformers_are_refused_by_name(tmp_path: Path, made: Made) -> None:
    directory = write_checkpoint(tmp_path / "model")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "rwkv6")
    add_config(writer, CONFIG)
    write_gguf(directory, tmp_path / "other.gguf")
    add_tokenizer(writer, directory)
    finish(writer)
    with pytest.raises(UnknownArchitectureError, match="architecture rwkv6 is not supported"):
        LLM(str(tmp_path / "m.gguf"), **OPTIONS)
    with pytest.raises(ConfigError, match="model_impl transformers needs a directory"):
        LLM(made()[1], model_impl="transformers", **OPTIONS)


def test_llama3_ropes_are_found_again(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    directory = write_checkpoint(tmp_path / "model", rope_scaling=scaling, rope_theta=500000.0)
    frequencies = 500000.0 ** (-np.arange(0, 16, 2) / 16)
    factors = []
    for frequency in frequencies:  # as the converter writes them
        wave = 2 * np.pi / frequency
        smooth = (8192 / wave - 1) / 3
        factors.append(1 if wave < 8192 / 4 else 8 if wave > 8192 else 1 / ((1 - smooth) / 8 + smooth))
    file = tmp_path / "m.gguf"
    write_gguf(directory, file, tensors={"rope_freqs.weight": np.array(factors, np.float32)})
    assert inspect_model(file).spec == inspect_model(directory).spec
    assert run(str(file)) == run(str(directory))


def test_a_directory_with_one_file_is_that_file(made: Made, tmp_path: Path) -> None:
    _, file = made()
    (tmp_path / "only.gguf").symlink_to(file)
    assert inspect_model(tmp_path).directory == tmp_path / "only.gguf"
    (tmp_path / "second.gguf").symlink_to(file)
    with pytest.raises(ModelError, match=r"only\.gguf, second\.gguf; name the file"):
        inspect_model(tmp_path)


def test_an_engine_built_of_a_file_gives_its_tokens(made: Made, tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.add_bos_token": True}
    file = write_gguf(Path(made()[0]), tmp_path / "m.gguf", extra=extra)
    build_engine(EngineConfig.from_options(model=str(file)), tmp_path / "engine", EngineLimits())
    assert run(str(tmp_path / "engine")) == run(str(file))
    ours, theirs = open_tokenizer(tmp_path / "engine"), open_tokenizer(file)
    assert ours.encode("the cat") == theirs.encode("the cat")
    assert ours.encode("x")[0] == BOS
    assert ours.chat_template == theirs.chat_template
    assert ours.eos_token_ids == theirs.eos_token_ids


def test_adapters_change_a_file_as_they_change_its_checkpoint(made: Made, tmp_path: Path) -> None:
    """Adapters go by the names of Hugging Face's files, whose rows the file has in another order."""
    directory, file = made("llama")
    kinds: dict[str, dict[str, Any]] = {
        "tables": {"tables": True},
        "dora": {"dora": True},
        "pissa": {"init_lora_weights": "pissa"},
    }
    requests = []
    for i, (name, options) in enumerate(kinds.items(), 1):
        requests.append(LoRARequest(name, i, write_adapter(tmp_path / name, directory, seed=i, **options)))
    answers = []
    for model in (directory, file):
        llm = LLM(model, enable_lora=True, max_loras=3, max_lora_rank=16, **OPTIONS)
        outputs = llm.generate(TEXTS, GREEDY, use_tqdm=False, lora_request=requests)
        answers.append([(one.outputs[0].token_ids, one.outputs[0].cumulative_logprob) for one in outputs])
    assert answers[0] == answers[1]
    assert answers[0] != [(tokens, logprob) for _, tokens, logprob in run(directory)]


LINEAR = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}


@pytest.mark.parametrize(
    ("overrides", "same"),
    [
        ({"rope_theta": 5e5}, {"rope_theta": 5e5}),
        ({"llama.rope.freq_base": 5e5}, {"rope_theta": 5e5}),
        (LINEAR, LINEAR),
    ],
)
def test_overrides_speak_of_keys(overrides: dict[str, Any], same: dict[str, Any], made: Made) -> None:
    directory, file = made("llama")
    wanted = inspect_model(directory, reading=Reading(config=same)).spec
    assert inspect_model(file, reading=Reading(config=overrides)).spec == wanted


def test_other_overrides_are_refused_by_name(made: Made) -> None:
    with pytest.raises(ModelError, match=r"may name its keys .* got hidden_act"):
        inspect_model(made("llama")[1], reading=Reading(config={"hidden_act": "relu"}))
    with pytest.raises(ModelError, match="architecture rwkv6 is not supported"):
        inspect_model(made("llama")[1], reading=Reading(architecture="rwkv6"))


@pytest.mark.parametrize(
    ("family", "extra", "rope"),
    [
        ("qwen2", {"qwen2.rope.dimension_count": 8}, RopeSpec("default", 10000.0, 8)),
        ("qwen2", {"qwen2.rope.scale_linear": 2.0}, RopeSpec("linear", 10000.0, 16, factor=2.0)),
        (
            "llama",
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0},
            RopeSpec("yarn", 10000.0, 16, factor=4.0, original_max_position=512),
        ),
    ],
)
def test_ropes_are_read_of_keys(
    family: str, extra: dict[str, Any], rope: RopeSpec, made: Made, tmp_path: Path
) -> None:
    file = write_gguf(Path(made(family)[0]), tmp_path / "m.gguf", family, extra=extra)
    layers = open_checkpoint_files(file).opened().spec.layers
    assert {layer.mixer and layer.mixer.rope for layer in layers} == {rope}


def test_a_file_that_turns_whole_heads_cannot_rotate_a_part(made: Made, tmp_path: Path) -> None:
    """Its pairs are neighbours in the whole head."""
    file = write_gguf(Path(made()[0]), tmp_path / "m.gguf", extra={"llama.rope.dimension_count": 8})
    with pytest.raises(ModelError, match=r"rope\.dimension_count must be a head's size, 16, got 8"):
        inspect_model(file)
