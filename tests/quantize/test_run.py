"""`quire quantize` on whole tiny models: written, read by the engine, interrupted, resumed, and refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.devices.cpu.backend import NativeBackend
from quire.devices.protocol import Limits
from quire.devices.reference.backend import ReferenceBackend
from quire.errors import ConfigError, ModelError
from quire.model.cost import matrices
from quire.model.load import open_for_reading
from quire.model.packing import Packer, WeightTypes, pack_weights
from quire.model.split_matrices import taken_apart
from quire.progress import Told, untold
from quire.quantize.layers import LayerRunner
from quire.quantize.methods import BITS, Method, Name
from quire.quantize.run import HIDDEN, STATE, Folding, Output, Quantizer
from quire.weights.checkpoint import open_checkpoint
from tests.model.tiny_models import Session
from tests.models import inspect_model, load_model
from tests.tiny import VOCAB_SIZE, write_checkpoint

WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
FAMILIES = {
    "llama": {**WIDE, "num_key_value_heads": 4},  # no grouped queries: values fold into the output projection
    "qwen2_moe": {**WIDE, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "gemma3": WIDE,
}
TOKENS = np.random.default_rng(0).integers(0, VOCAB_SIZE, (6, 24)).astype(np.int32)


STACKED = {
    "gpt_oss": {**WIDE, "head_dim": 32},
    "llama4_text": {**WIDE, "intermediate_size_mlp": 128, "intermediate_size": 64},
    "granitemoeshared": {**WIDE, "intermediate_size": 64, "shared_intermediate_size": 64},
    "aria_text": {**WIDE, "intermediate_size": 64},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_inner": 128},
}


def method_of(name: Name, bits: int | None = None) -> Method:
    return Method.of(name, bits, 32, True, 0.01)


def quantize(
    source: Path, output: Path, name: Name, told: Told = untold, bits: int | None = None
) -> list[str]:
    quantizer = Quantizer(source, method_of(name, bits), NativeBackend(threads=1), TOKENS)
    return quantizer.run(output, {"method": name}, told)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("float")
    return {name: write_checkpoint(root / name, name, **config) for name, config in FAMILIES.items()}


def logits(model: Path) -> Any:
    backend = NativeBackend(threads=1)
    return Session(load_model(model, backend, "float32"), backend).feed(TOKENS[0].tolist())


SPARSE: dict[str, dict[str, Any]] = {
    "deepseek_v32": {},
    "glm_moe_dsa": {"index_topk": 40},  # whose choice is shared
    "hy_v4": {"index_topk": 40},
    "minimax_m3": {},
    "deepseek_v4": {},
    "qwen3_5": {},
    "qwen4": {},
    "nemotron-nas": {},  # some layers keep nothing
}


@pytest.mark.parametrize("family", SPARSE)
def test_layers_with_states_and_choices_are_run_alone(family: str, tmp_path: Path) -> None:
    """One by one they give what the whole model's last layer does, and all methods write what is served."""
    source, backend = (
        write_checkpoint(tmp_path / "in", family, hidden_size=64, **SPARSE[family]),
        NativeBackend(threads=1),
    )
    spec, opened, plain = open_for_reading(source)
    checkpoint, names = taken_apart(spec, plain, opened)
    runner = LayerRunner(spec, names, checkpoint, backend, TOKENS)
    for index in range(spec.num_layers):
        runner.run(index, {}, keep=True)
    last, runner.hidden, kept = runner.hidden, None, spec.kv_spec("float32")
    states, length = int(kept.bytes_per_state(0) > 0), TOKENS.shape[1]
    graph = load_model(source, backend, "float32").decoder.graph(headless=True)
    whole = backend.compile(graph, backend.kv_cache(kept, 1, length, states), Limits(length, 1, 1))
    whole.run(runner._step(0, states))
    assert last is not None
    assert np.array_equal(whole.hidden(), last[0])
    for name in ("rtn", "gptq", "smoothquant", "fp8"):
        quantize(source, tmp_path / name, name)
        assert np.isfinite(logits(tmp_path / name)).all()


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("glm_moe_dsa", "layer 1 shares a choice of 9 keys: --sample-len can be at most 9"),
        ("zamba2", "serves several layers: round this model when it is loaded"),
        ("gemma3n_text", "cannot be parted before layer"),
    ],
)
def test_layers_that_need_others_are_refused(family: str, message: str, tmp_path: Path) -> None:
    kept = {"num_kv_shared_layers": 1} if family.startswith("gemma") else {}
    with pytest.raises(ModelError, match=message):
        quantize(write_checkpoint(tmp_path / "in", family, **kept), tmp_path / "out", "gptq")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", BITS)
def test_a_model_is_written_and_served(
    family: str, name: Name, sources: dict[str, Path], tmp_path: Path
) -> None:
    kept = quantize(sources[family], tmp_path / "out", name)
    assert not (tmp_path / "out" / STATE).exists()
    assert not (tmp_path / "out" / HIDDEN).exists()
    assert all("gate" in module for module in kept)  # routers
    info = inspect_model(tmp_path / "out")
    assert info.quantized is not None
    right, got = logits(sources[family]), logits(tmp_path / "out")
    bits = method_of(name).bits
    part = 0.7 if bits < 8 else 0.25 if family == "qwen2_moe" else 0.1  # random routers choose other experts
    assert np.abs(got - right).std() < part * right.std()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["awq", "smoothquant"])
def test_folding_changes_weights_and_not_what_a_layer_computes(
    family: str, name: Name, sources: dict[str, Path]
) -> None:
    spec, checkpoint, names = open_for_reading(sources[family])
    runner = LayerRunner(spec, names, checkpoint, NativeBackend(threads=1), TOKENS)
    folding = Folding(spec.layers[0], names, checkpoint, names.layer.format(i=0))
    quantizer = Quantizer(sources[family], method_of(name), NativeBackend(threads=1), TOKENS)
    inputs, stats = quantizer._observe(runner, 0, folding, True)
    folding.fold(inputs, stats, runner.noted, method_of(name))
    runner.run(0, {}, keep=True)
    plain = runner.hidden
    runner.hidden = None
    runner.run(0, folding.changed, keep=True)
    assert plain is not None
    np.testing.assert_allclose(runner.hidden, plain, rtol=1e-3, atol=2e-4 * np.abs(plain).max())
    assert len(folding.changed) > 4


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_one_by_one_are_the_model(family: str, sources: dict[str, Path]) -> None:
    spec, checkpoint, names = open_for_reading(sources[family])
    runners = [
        LayerRunner(spec, names, checkpoint, b, TOKENS[:2])
        for b in (NativeBackend(threads=1), ReferenceBackend())
    ]
    for index in range(spec.num_layers):
        seen: list[list[Any]] = [[], []]
        for runner, into in zip(runners, seen, strict=True):
            runner.run(
                index,
                {},
                lambda found, x, into=into: into.append((tuple(found.tensors), x.copy())),
                keep=True,
            )
        for (tensors, x), (others, y) in zip(*seen, strict=True):
            assert tensors == others
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3)


def test_an_interrupted_run_goes_on_and_writes_the_same(
    sources: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantize(sources["llama"], tmp_path / "whole", "gptq")
    calls = itertools.count()

    def stop(_: int) -> None:
        if next(calls) == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(sources["llama"], tmp_path / "parts", "gptq", stop)
    assert json.loads((tmp_path / "parts" / STATE).read_text())["done"] == 1
    first = (tmp_path / "parts" / "model-00001-of-00003.safetensors").stat().st_mtime_ns
    with pytest.raises(ConfigError, match="other options"):
        quantize(sources["llama"], tmp_path / "parts", "awq")
    assert "goes on" not in caplog.text
    quantize(sources["llama"], tmp_path / "parts", "gptq")
    assert f"{tmp_path / 'parts'}: an interrupted run goes on after layer 1 of 2" in caplog.text
    assert (tmp_path / "parts" / "model-00001-of-00003.safetensors").stat().st_mtime_ns == first
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "parts" / path.name).read_bytes(), path.name


def test_what_cannot_be_quantized_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        quantize(sources["llama"], tmp_path / "full", "fp8")
    quantize(sources["llama"], tmp_path / "once", "fp8")
    with pytest.raises(ModelError, match=r"quantized already \(compressed-tensors\)"):
        quantize(tmp_path / "once", tmp_path / "twice", "fp8")
    with pytest.raises(ConfigError, match="awq makes 4 bits"):
        Method.of("awq", 3, 128, True, 0.01)
    narrow = Quantizer(
        sources["llama"], Method.of("gptq", 4, 48, True, 0.01), NativeBackend(threads=1), TOKENS
    )
    with pytest.raises(
        ModelError, match=r"q_proj\.weight cannot be quantized to gptq: its 64 columns .*--group-size 64 or"
    ):
        narrow.run(tmp_path / "narrow", {}, untold)
    assert Output.open(tmp_path / "new", {}, 3).done == 0


@pytest.mark.parametrize("name", ["gptq", "awq", "fp8"])
@pytest.mark.parametrize("family", STACKED)
def test_stacked_experts_and_outputs_as_columns_come_apart(family: str, name: Name, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "float", family, **STACKED[family])
    kept = quantize(source, tmp_path / "out", name)
    spec, checkpoint, names = open_for_reading(source)
    apart, plain = taken_apart(spec, names, checkpoint)
    assert not plain.transposed
    assert not plain.expert_stack
    assert all("gate" in module or "router" in module for module in kept)
    written = open_checkpoint(tmp_path / "out")
    suffix = {"fp8": "weight_scale"}.get(name, "qweight")
    packed = {n.removesuffix(f".{suffix}") for n in written.names() if n.endswith(f".{suffix}")}
    of_layers = {
        n.removesuffix(".weight")
        for n in apart.names()
        if n.endswith(".weight") and len(apart.shape(n)) == 2 and ".wte" not in n and ".wpe" not in n
    }
    tables = {plain["embedding"], plain["head"]}
    assert packed == of_layers - set(kept) - tables
    right, got = logits(source), logits(tmp_path / "out")
    assert np.abs(got - right).std() < (0.4 if name == "fp8" else 0.9) * right.std()


def test_values_that_come_apart_are_those_of_the_stack(tmp_path: Path) -> None:
    """The same model, its tensors written apart, gives the same logits bit for bit."""
    for family, config in STACKED.items():
        source = write_checkpoint(tmp_path / family, family, **config)
        spec, checkpoint, names = open_for_reading(source)
        apart, plain = taken_apart(spec, names, checkpoint)
        backend = NativeBackend(threads=1)
        packed = [
            pack_weights(spec, own, Packer(held, backend, WeightTypes.of("float32", None)))
            for own, held in ((names, checkpoint), (plain, apart))
        ]
        first, second = (matrices(decoder.weights).values() for decoder in packed)
        for one, other in zip(first, second, strict=True):
            assert one.dequantize().tobytes() == other.dequantize().tobytes(), family
