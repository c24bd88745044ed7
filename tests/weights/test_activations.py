"""Roundings of activations: against plain formulas, between devices, and in checkpoints whose library gives logits."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.devices.cpu.backend import NativeBackend
from quire.devices.reference.backend import ReferenceBackend
from quire.errors import ConfigError, ModelError
from quire.weights.activations import Rounding, restored_rounding, stored_rounding
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.checkpoint.safetensors import write_safetensors
from quire.weights.layouts import Blocks, Int4, Int8
from quire.weights.readers import load_reader
from quire.weights.schemes import Kept, Quantized, scheme, weights_name
from quire.weights.tensor import QuantTensor
from tests.devices.native_cases import EXACT, ISAS, linear, native
from tests.model.tiny_models import Session
from tests.models import load_model
from tests.shared import cases_of, needs
from tests.weights.test_quantized_checkpoints import FOLDERS, QUANTIZED

E4M3 = [float(v) for v in np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
ROUNDINGS = [
    Rounding(number="int8"),
    Rounding(number="int8", columns=32),
    Rounding(number="int8", asymmetric=True),
    Rounding(number="int8", scales="fixed", outer=0.03),
    Rounding(number="int8", scales="fixed", outer=0.03, zero=-40),
    Rounding(number="e4m3"),
    Rounding(number="e4m3", most=0.5),
    Rounding(number="e4m3", columns=128),
    Rounding(number="e4m3", columns=128, scales="powers"),
    Rounding(number="e4m3", columns=32, scales="e8m0"),
    Rounding(number="e4m3", scales="fixed", outer=0.004),
    Rounding(number="e2m1", columns=32, scales="e8m0"),
    Rounding(number="e2m1", columns=16, scales="e4m3", outer=300.0),
]


def nearest(value: float, numbers: list[float]) -> float:
    """The nearest magnitude; of two as near, the one with the even code."""
    size = min(abs(value), numbers[-1])
    best = min(range(len(numbers)), key=lambda code: (abs(numbers[code] - size), code % 2))
    return float(np.copysign(numbers[best], value))


@pytest.mark.parametrize("number", ["e4m3", "e2m1"])
def test_floats_of_few_bits_are_the_nearest_ones(number: Any) -> None:
    numbers = E4M3 if number == "e4m3" else E2M1
    middles = [(a + b) / 2 for a, b in pairwise(numbers)]
    x = np.array([*numbers, *middles, 1e9, *np.random.default_rng(0).standard_normal(50) * 3], np.float32)
    x = np.concatenate([x, -x])
    got = Rounding(number=number, scales="fixed", outer=1.0).round(x[None])[0]
    assert got.tolist() == [nearest(float(v), numbers) for v in x]


def test_scales_are_those_of_the_formats() -> None:
    x = np.zeros((1, 64), np.float32)
    x[0, :3] = 3.5, -7.0, 0.1
    x[0, 40] = 448.0
    by_token = Rounding(number="int8").round(x)
    scale = np.float32(448) / np.float32(127)
    np.testing.assert_array_equal(by_token[0, :2], np.float32([1, -2]) * scale)
    # 7 / 6 rounded up to a power of two is 2; the exponent of an MX scale is floor(log2(7)) - 2, plus 1 from 1.75 on.
    mx = Rounding(number="e2m1", columns=32, scales="e8m0").round(x)[0, :3]
    np.testing.assert_array_equal(mx, np.float32([4.0, -8.0, 0.0]))  # scale 2: 1.75 goes up, 3.5 too
    powers = Rounding(number="e4m3", columns=32, scales="powers").round(x)[0, 1]
    assert powers == -7.0
    bounded = Rounding(number="e4m3", most=224.0).round(x)[0]
    assert bounded[40] == 224.0
    spans = Rounding(number="int8", asymmetric=True).round(np.float32([[0, 255, 17]]))
    np.testing.assert_array_equal(spans, np.float32([[0, 255, 17]]))


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
def test_what_is_not_finite_stays_so_and_zeros_stay_zeros(rounding: Rounding) -> None:
    x = np.ones((3, 128), np.float32)
    x[0, 5], x[1, 7], x[2] = np.nan, np.inf, 0
    got = rounding.round(x)
    assert np.isnan(got[0, 5])
    assert np.isnan(got[1, 7])
    assert np.isnan(got[0, :16]).all()
    if not rounding.zero:
        assert (got[2] == 0).all()
    assert restored_rounding(stored_rounding(rounding)) == rounding


def weight_of(layout: Any) -> QuantTensor:
    values = np.random.default_rng(1).standard_normal((40, 256)).astype(np.float32)
    tensor: QuantTensor = layout.quantize(values)
    return tensor


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layout", [Int8(), Int4(64), Blocks("e4m3"), Blocks("nvfp4")], ids=repr)
@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
def test_devices_round_alike(isa: str, layout: Any, rounding: Rounding) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((19, 256)).astype(np.float32) * rng.lognormal(0, 1, (19, 1)).astype(np.float32)
    x[3] = 0
    weight, dtype = weight_of(layout), Quantized(layout, rounding)
    right = linear(ReferenceBackend(), x, weight, dtype)
    backend = native(isa)
    got = linear(backend, x, weight, dtype)
    np.testing.assert_allclose(got, right, rtol=2e-5, atol=2e-4 * np.abs(right).max())
    for rows in (1, 2):
        assert linear(backend, x[:rows], weight, dtype).tobytes() == got[:rows].tobytes()


@pytest.mark.parametrize("backend", [ReferenceBackend(), NativeBackend(threads=1)], ids=lambda b: b.name)
def test_a_stored_weight_keeps_its_rounding(backend: Any) -> None:
    rounding = ROUNDINGS[-1]
    matrix = backend.matrix([weight_of(Blocks("nvfp4"))], Quantized(Blocks("nvfp4"), rounding))
    about, data = backend.export(matrix)
    aligned = np.empty(len(data) + 64, np.uint8)
    at = -aligned.ctypes.data % 64
    aligned[at : at + len(data)] = data
    again = backend.restore(about, aligned[at : at + len(data)])
    assert backend.export(again)[0] == about
    assert "e2m1" in str(about)


def test_weights_of_one_input_share_the_wider_scale() -> None:
    small, large = (Rounding(number="e4m3", scales="fixed", outer=outer) for outer in (0.1, 0.2))
    assert small.joined(large) == large
    inner = [Rounding(number="e2m1", scales="e4m3", columns=16, outer=outer) for outer in (100.0, 50.0)]
    assert inner[0].joined(inner[1]) == inner[1]
    assert small.joined(inner[0]) is None


ROUNDED = [folder for folder in FOLDERS if "logits_act" in np.load(folder / "expected.npz").files]


@pytest.mark.parametrize("folder", cases_of(QUANTIZED, ROUNDED), ids=lambda path: path.name)
def test_a_checkpoint_s_own_roundings_give_its_logits(folder: Path) -> None:
    expected, backend = np.load(folder / "expected.npz"), native(EXACT)
    model = load_model(folder, backend, "float32", Kept("checkpoint"))
    assert model.info.quantized is not None
    logits = Session(model, backend).feed(expected["prompt"].tolist())
    error = np.abs(logits - expected["logits_act"]).max()
    whole = np.abs(expected["logits"] - expected["logits_act"]).max()
    if folder.name == "fp8-autofp8-static":  # its projections of one input have scales of their own
        assert error < 1.2 * whole
    else:
        assert error < 5e-2
        assert error < 0.1 * whole
    pieces = Session(model, backend)
    prompt = expected["prompt"].tolist()
    parts = [pieces.feed(prompt[start:stop]) for start, stop in ((0, 1), (1, 6), (6, len(prompt)))]
    assert np.concatenate(parts).tobytes() == logits.tobytes()


@needs(QUANTIZED)
def test_an_engine_with_the_options_answers_and_says_so() -> None:
    folder = next(path for path in ROUNDED if path.name == "modelopt-fp8-kv")
    prompt = np.load(folder / "expected.npz")["prompt"].tolist()
    options: dict[str, Any] = {"quantization_activations": "checkpoint", "kv_cache_dtype": "fp8"}
    with LLM(str(folder), skip_tokenizer_init=True, **options) as llm:
        both = llm.generate(
            [{"prompt_token_ids": prompt}] * 2, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        )
        one = llm.generate(
            [{"prompt_token_ids": prompt}], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        )
    assert [list(result.outputs[0].token_ids) for result in both] == [list(one[0].outputs[0].token_ids)] * 2
    assert weights_name(Kept("checkpoint", ("FP8 E4M3",)), "bfloat16") == "FP8 E4M3, activations as published"


STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
FP8_TENSORS = {
    "a.weight": np.ones((32, 64), ml_dtypes.float8_e4m3fn),
    "a.weight_scale": np.ones((), np.float32),
    "a.input_scale": np.float32([0.5]),
}
INT8_TENSORS = {
    "a.weight": np.ones((32, 64), np.int8),
    "a.weight_scale": np.ones((32, 1), np.float32),
    "a.input_scale": np.float32([0.5]),
    "a.input_zero_point": np.int8([-3]),
}


def ct_settings(**inputs: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8}, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"g": group}, "ignore": ["b"]}


def reader(path: Path, tensors: dict[str, Any], settings: dict[str, Any]) -> Checkpoint:
    write_safetensors(path / "model.safetensors", {k: v for k, v in tensors.items() if v is not None})
    return load_reader("compressed-tensors")(open_checkpoint(path), settings=settings)


@pytest.mark.parametrize(
    ("tensors", "settings", "rounding"),
    [
        (FP8_TENSORS, STATIC, Rounding(number="e4m3", scales="fixed", outer=0.5)),
        (FP8_TENSORS, {"quant_method": "fp8"}, Rounding(number="e4m3")),
        (
            FP8_TENSORS,
            {"quant_method": "fp8", "weight_block_size": [128, 64], "scale_fmt": "ue8m0"},
            Rounding(number="e4m3", scales="powers", columns=64),
        ),
        (
            FP8_TENSORS,
            {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
            Rounding(number="e4m3", most=1200.0),
        ),
        (FP8_TENSORS, {"quant_algo": "FP8"}, Rounding(number="e4m3", scales="fixed", outer=0.5)),
        (
            {**FP8_TENSORS, "a.input_scale": None},
            {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
            Rounding(number="e4m3"),
        ),
        ({**FP8_TENSORS, "a.input_scale": None}, {"quant_algo": "FP8_PB_WO"}, None),
        (
            INT8_TENSORS,
            ct_settings(num_bits=8, type="int", dynamic=False),
            Rounding(number="int8", scales="fixed", outer=0.5, zero=-3),
        ),
        (INT8_TENSORS, ct_settings(num_bits=8, type="int", dynamic=True), Rounding(number="int8")),
        (INT8_TENSORS, {**ct_settings(num_bits=8, dynamic=True), "ignore": ["b"]}, Rounding(number="int8")),
        (
            INT8_TENSORS,
            ct_settings(num_bits=8, type="int", dynamic=True, symmetric=False),
            Rounding(number="int8", asymmetric=True),
        ),
        (INT8_TENSORS, ct_settings(), None),
        (INT8_TENSORS, {**ct_settings(num_bits=8, dynamic=True), "ignore": ["a"]}, None),
        (
            INT8_TENSORS,
            {"global_quant_config": {"input_tensors": {"dtype": "int8", "is_dynamic": True}}},
            Rounding(number="int8"),
        ),
        (
            INT8_TENSORS,
            {
                "global_quant_config": {"input_tensors": {"dtype": "int8", "is_dynamic": True}},
                "layer_quant_config": {"a*": {"input_tensors": None}},
            },
            None,
        ),
    ],
)
def test_configs_say_how_inputs_are_rounded(
    tensors: dict[str, Any], settings: dict[str, Any], rounding: Rounding | None, tmp_path: Path
) -> None:
    checkpoint = reader(tmp_path, tensors, settings)
    assert checkpoint.rounding("a.weight") == rounding
    if rounding is not None:
        assert checkpoint.activations == ("checkpoint" if rounding.number == "int8" else "float")


def test_experts_are_rounded_only_to_integers(tmp_path: Path) -> None:
    for tensors, settings, rounds in (
        (INT8_TENSORS, ct_settings(num_bits=8, type="int", dynamic=True), True),
        (FP8_TENSORS, {"quant_method": "fp8"}, False),
    ):
        named = {name.replace("a.", "mlp.experts.3.up_proj."): array for name, array in tensors.items()}
        found = reader(tmp_path, named, settings).rounding("mlp.experts.3.up_proj.weight")
        assert (found is not None) == rounds


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (None, "a.input_scale is missing"),
        (np.float32([np.nan]), "a.input_scale must be finite"),
        (np.float32([0.0]), "a.input_scale must be greater than 0"),
        (np.float32([1.0, 2.0]), "a.input_scale must be float32"),
    ],
)
def test_static_scales_must_be_there_and_right(scale: Any, said: str, tmp_path: Path) -> None:
    checkpoint = reader(tmp_path, {**FP8_TENSORS, "a.input_scale": scale}, STATIC)
    checkpoint.quantized("a.weight", np.arange(32))  # without them
    with pytest.raises(ModelError, match=said):
        checkpoint.rounding("a.weight")


def test_the_option_is_for_quantized_checkpoints() -> None:
    assert scheme("auto", activations="checkpoint") == Kept("checkpoint")
    assert scheme("fp8", activations="checkpoint") == Kept("checkpoint")
    for name, rounds in (("int8", False), ("fp8", True), ("auto", True)):
        with pytest.raises(ConfigError, match="--quantization-activations checkpoint"):
            scheme(name, activations="checkpoint", rounds=rounds)
