"""Scales of an FP8 KV cache that come along with a checkpoint: found under every exporter's name, and used alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.build import build_engine
from quire.config import EngineConfig
from quire.devices.cpu.backend import NativeBackend
from quire.devices.graph import record
from quire.devices.kv import KVScales
from quire.devices.ops import Attend, Embed, Linear, SelectRows, StoreKV
from quire.devices.protocol import Attention, Backend, KVSpec, Limits, ModelInput
from quire.devices.reference.backend import ReferenceBackend
from quire.devices.torch.backend import TorchBackend
from quire.errors import EngineError, ModelError
from quire.model.info import EngineLimits
from quire.model.shard import Shard
from quire.weights.checkpoint import open_checkpoint
from quire.weights.checkpoint.safetensors import write_safetensors
from quire.weights.readers.kv_scales import read_kv_scales
from tests.devices.native_cases import EXACT, ISAS, native
from tests.model.tiny_models import Session
from tests.models import inspect_model, load_model
from tests.shared import DATA, needs

LAYERS = ["model.layers.0.", "model.layers.1."]
FP8 = DATA / "quantized" / "modelopt-fp8-kv"


def found(tmp_path: Path, tensors: dict[str, Any]) -> tuple[KVScales | None, ...]:
    write_safetensors(
        tmp_path / "model.safetensors", {k: np.asarray(v, np.float32) for k, v in tensors.items()}
    )
    return read_kv_scales(open_checkpoint(tmp_path), LAYERS, [2, 2])


@pytest.mark.parametrize(
    ("names", "scales"),
    [
        ({"self_attn.k_scale": [2], "self_attn.v_scale": [3]}, KVScales((2, 2), (3, 3))),
        ({"self_attn.k_proj.k_scale": 2, "self_attn.v_proj.v_scale": 3}, KVScales((2, 2), (3, 3))),
        ({"self_attn.kv_scale": [4]}, KVScales((4, 4), (4, 4))),
        ({"self_attn.k_proj.output_scale": 2, "self_attn.v_proj.output_scale": 3}, KVScales((2, 2), (3, 3))),
        ({"self_attn.attn.k_scale": 2, "self_attn.attn.v_scale": 3}, KVScales((2, 2), (3, 3))),
        ({"self_attn.k_scale": [[[2]], [[5]]], "self_attn.v_scale": [3, 4]}, KVScales((2, 5), (3, 4))),
        ({"self_attn.k_scale": [2]}, KVScales((2, 2), (2, 2))),
        ({"self_attn.k_scale": [2], "self_attn.v_scale": [0]}, KVScales((2, 2), (1, 1))),
        ({"self_attn.q_proj.output_scale": 2, "self_attn.q_scale": 3}, None),
    ],
)
def test_names_of_all_exporters(names: dict[str, Any], scales: KVScales | None, tmp_path: Path) -> None:
    tensors = {f"model.layers.1.{name}": value for name, value in names.items()}
    assert found(tmp_path, tensors) == (() if scales is None else (None, scales))


@pytest.mark.parametrize(
    ("value", "said"), [([1, 2, 3], "one for each of 2 heads"), ([np.nan], "must be finite")]
)
def test_scales_of_another_shape_and_nan_are_named(value: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"model.layers.0.self_attn.k_scale .*{said}"):
        found(tmp_path, {"model.layers.0.self_attn.k_scale": value})


@needs(FP8)
def test_a_cache_in_fp8_is_divided_by_them(tmp_path: Path) -> None:
    expected = np.load(FP8 / "expected.npz")
    prompt, results = expected["prompt"].tolist(), []
    for backend in (native(EXACT), ReferenceBackend()):
        model = load_model(FP8, backend)
        scales = model.info.kv_spec("fp8_e4m3").scales_of(0)
        assert scales is not None
        assert len(scales.keys) == 2
        assert 0.01 < scales.keys[0] < 0.02
        assert not model.info.kv_spec("bfloat16").scales
        results.append(Session(model, backend, kv_dtype="fp8_e4m3").feed(prompt))
        assert 0 < np.abs(results[-1] - expected["logits"]).mean() < 0.05
    np.testing.assert_allclose(results[0], results[1], atol=2e-2)
    info = inspect_model(FP8)
    assert info.kv_spec("fp8_e4m3", Shard(1, 2)).scales_of(0) == KVScales(scales.keys[1:], scales.values[1:])


@needs(FP8)
def test_a_built_engine_keeps_them(tmp_path: Path) -> None:
    config = EngineConfig.from_options(model=str(FP8), skip_tokenizer_init=True)
    build_engine(config, tmp_path / "engine", EngineLimits())
    assert inspect_model(tmp_path / "engine").kv_scales == inspect_model(FP8).kv_scales


SCALES = KVScales((20.0, 40.0), (18.0, 30.0))


def attended(backend: Backend, spec: KVSpec) -> Any:
    """Outputs of 4 query heads over the keys and values, in thousands, of 20 tokens; each token is a row of a table."""
    rows, width = np.random.default_rng(7).standard_normal((20, 8 * 16)).astype(np.float32), 4 * 16
    rows[:, :width] /= 500
    rows[:, width:] *= 2000
    table = backend.matrix([rows], "float32")
    head = backend.matrix([np.ones((8, width), np.float32)], "float32")

    def hidden(g: Any) -> Any:
        q = g(StoreKV(g(Embed(table)), 0, 4, None, None, None))
        return g(SelectRows(g(Attend(q, 0, 4, Attention(0.02)))))

    graph = record(hidden, lambda g, h: g(Linear(h, head)), 8, width, num_token_ids=20)
    executable = backend.compile(graph, backend.kv_cache(spec, 5, 4), Limits(20, 1, 20))
    executable.run(rows_step(20, 4))
    return executable.hidden().copy()


def rows_step(rows: int, block: int) -> ModelInput:
    numbers, table = np.arange(rows, dtype=np.int32), np.arange(rows // block, dtype=np.int32)[None]
    ends, one = np.array([0, rows], np.int32), np.array([rows], np.int32)
    return ModelInput(numbers, numbers, ends, one, np.zeros(1, np.int32), table, numbers)


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_large_keys_and_values_need_their_scales(dtype: Any) -> None:
    """Without them they are cut off, with them only rounded; all devices agree."""
    exact = attended(ReferenceBackend(), KVSpec(1, 2, 16, "float32"))
    right = attended(ReferenceBackend(), KVSpec(1, 2, 16, dtype, scales=(SCALES,)))
    cut = attended(ReferenceBackend(), KVSpec(1, 2, 16, dtype))
    size = np.abs(exact).mean()
    assert np.abs(right - exact).mean() < 0.1 * size
    assert dtype == "fp8_e5m2" or np.abs(cut - exact).mean() > 0.3 * size
    for backend in [*(native(isa) for isa in ISAS), TorchBackend()]:
        got = attended(backend, KVSpec(1, 2, 16, dtype, scales=(SCALES,)))
        np.testing.assert_allclose(got, right, atol=2e-3 * size)


def test_scales_are_for_fp8_only() -> None:
    one = (KVScales((1.0,), (1.0,)),)
    with pytest.raises(EngineError, match="only a KV cache in FP8 has scales"):
        NativeBackend(threads=1).kv_cache(KVSpec(1, 1, 16, "float16", scales=one), 1, 16)
    bad = (KVScales((0.0,), (1.0,)),)
    with pytest.raises(EngineError, match="a positive scale"):
        NativeBackend(threads=1).kv_cache(KVSpec(1, 1, 16, "fp8_e4m3", scales=bad), 1, 16)
