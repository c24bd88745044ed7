"""Published configs of quantized models: planned to the byte that their tensors take, or refused by what is missing."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from quire.devices.cpu.backend import NativeBackend
from quire.errors import ModelError
from quire.files import read_json
from quire.model.cost import weight_bytes
from quire.model.families import read_model
from quire.model.outline import ConfigFiles
from quire.model.packing import (
    Packer,
    WeightTypes,
    choose_dtype,
    own_quantization,
    pack_weights,
    wanted_tensors,
)
from quire.weights.checkpoint.protocol import Unquantized
from quire.weights.readers import find_quantization
from quire.weights.tensor import Array
from tests.shared import DATA, cases_of

CONFIGS = DATA / "model-configs"
SIDE = "hf_quant_config.json"
BF16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
F32, U8, I32, I64 = (np.dtype(kind) for kind in (np.float32, np.uint8, np.int32, np.int64))
Fields = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]  # the last names of a module's tensors


def fp8_blocks(rows: int, columns: int) -> Fields:
    tiles = -(-rows // 128), -(-columns // 128)
    return {".weight": (E4M3, (rows, columns)), ".weight_scale_inv": (F32, tiles)}


def fp8_static(rows: int, columns: int) -> Fields:
    return {".weight": (E4M3, (rows, columns)), ".weight_scale": (F32, ()), ".input_scale": (F32, ())}


def nvfp4(rows: int, columns: int) -> Fields:
    scales = {".weight_scale": (E4M3, (rows, columns // 16)), ".weight_scale_2": (F32, ())}
    return {".weight": (U8, (rows, columns // 2)), **scales, ".input_scale": (F32, ())}


def packed_int4(rows: int, columns: int) -> Fields:
    scales = {".weight_scale": (BF16, (rows, columns // 32)), ".weight_shape": (I64, (2,))}
    return {".weight_packed": (I32, (rows, columns // 8)), **scales}


def mxfp4(*shape: int) -> Fields:
    *rows, columns = shape
    return {"_blocks": (U8, (*rows, columns // 32, 16)), "_scales": (U8, (*rows, columns // 32))}


LINEAR = r".*\.layers\.\d+\.(self_attn\.\w+_proj\w*|(mlp|block_sparse_moe|moe|share_expert)\.(.*\.)?(w\d|\w+_proj))"
EXPERTS = r".*\.experts\..*"
# How the tensors of a repository are made, and which of its modules have them.
FORMATS: dict[str, tuple[Callable[..., Fields], str]] = {
    "MiniMaxAI--MiniMax-M2.5": (fp8_blocks, LINEAR),
    "MiniMaxAI--MiniMax-M2.7": (fp8_blocks, LINEAR),
    "Qwen--Qwen3-30B-A3B-FP8": (fp8_blocks, LINEAR),
    "XiaomiMiMo--MiMo-V2-Flash": (fp8_blocks, LINEAR),
    "deepseek-ai--DeepSeek-R1": (fp8_blocks, LINEAR),
    "deepseek-ai--DeepSeek-V3": (fp8_blocks, LINEAR),
    "Qwen--Qwen3-32B-FP8-Static-PerTensor": (fp8_static, LINEAR),
    "moonshotai--Kimi-K2.5": (packed_int4, EXPERTS),
    "nvidia--Gemma-4-31B-IT-NVFP4": (nvfp4, r".*\.mlp\..*"),
    "nvidia--Kimi-K2.6-NVFP4": (nvfp4, rf"(?!.*layers\.0\.){EXPERTS}"),
    "nvidia--MiniMax-M2.5-NVFP4": (nvfp4, EXPERTS),
    "nvidia--MiniMax-M2.7-NVFP4": (nvfp4, EXPERTS),
    "openai--gpt-oss-20b": (mxfp4, r".*\.experts\.\w+_proj"),
}


class Headers(Unquantized):
    """The tensors of a repository without values."""

    def __init__(self, tensors: Fields) -> None:
        self._tensors, self._shapes = tensors, dict[str, tuple[int, ...]]()

    def names(self) -> Iterable[str]:
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name][1]

    def dtype(self, name: str) -> np.dtype[Any]:
        return self._tensors[name][0]

    def path(self, name: str) -> Path:
        return Path("model.safetensors")

    def get(self, name: str) -> Array:
        rows, width = self.shape(f"{name.removesuffix('_shape')}_packed")
        return np.array([rows, width * 8], np.int64)


def shortened(config: dict[str, Any]) -> dict[str, Any]:
    """A config of four layers and few experts; its lists by layer too."""
    for about in (config, config.get("text_config") or {}):
        layers = about.get("num_hidden_layers")
        for key, value in list(about.items()):
            if isinstance(value, list) and layers and layers <= len(value) <= layers + 3:
                about[key] = value[:4]
            if key == "hybrid_override_pattern":
                about[key] = value[:4]
            if key in ("n_routed_experts", "num_local_experts", "num_experts") and value:
                about[key] = min(value, 16)
            if key == "num_experts_per_tok" and value:
                about[key] = min(value, 16)
        if layers:
            about["num_hidden_layers"] = 4
        if "first_k_dense_replace" in about:
            about["first_k_dense_replace"] = min(about["first_k_dense_replace"], 1)
    return config


def quantized_configs() -> list[str]:
    found = []
    for path in sorted(CONFIGS.glob("*_config.json")):
        name = path.name.removesuffix("_config.json")
        if name.endswith("_hf_quant"):
            continue
        config = read_json(path)
        inner = config.get("text_config")
        sections = [
            about.get("quantization_config") for about in (config, inner if isinstance(inner, dict) else {})
        ]
        if any(sections) or (CONFIGS / f"{name}_{SIDE}").exists():
            found.append(name)
    return found


def repository(name: str, folder: Path) -> Path:
    """The config of a repository, shortened, in a folder with the file beside it."""
    (folder / "config.json").write_text(json.dumps(shortened(read_json(CONFIGS / f"{name}_config.json"))))
    if (CONFIGS / f"{name}_{SIDE}").exists():
        shutil.copy(CONFIGS / f"{name}_{SIDE}", folder / SIDE)
    return folder / "config.json"


def bytes_of_tensors(path: Path, make: Callable[..., Fields], modules: str) -> int:
    """What the tensors take that the repository holds, made here from the formats' own rules."""
    config = read_json(path)
    spec, names = read_model(config, str(path))
    wanted, tensors = wanted_tensors(spec, names), Fields()
    for name, tensor in wanted.items():
        module = name.removesuffix(".weight")
        if re.fullmatch(modules, module):
            tensors |= {module + suffix: about for suffix, about in make(*tensor.shape).items()}
        else:
            tensors[name] = BF16, tensor.shape
    found = find_quantization(config, str(path), path.parent)
    assert found is not None
    checkpoint = found.reader()(Headers(tensors))
    types = WeightTypes.of(
        choose_dtype("auto", wanted, checkpoint), own_quantization("auto", wanted, checkpoint, None)
    )
    packer = Packer(checkpoint, NativeBackend(threads=1).outline(), types, outline=True)
    decoder = pack_weights(spec, names, packer)
    return weight_bytes(decoder.weights)


@pytest.mark.parametrize("name", cases_of(CONFIGS, quantized_configs()))
def test_a_published_config_is_planned_to_the_byte_or_refused(name: str, tmp_path: Path) -> None:
    path, outline = repository(name, tmp_path), NativeBackend(threads=1).outline()
    planned, refused = None, ""
    try:
        planned = ConfigFiles(path).outline(outline)
    except ModelError as error:
        refused = str(error)
    if planned is None:
        assert name not in FORMATS
        assert re.search(r"architecture \w+ is not supported|quantization_config", refused)
        return
    assert planned.info.quantized is not None
    if name in FORMATS:
        assert planned.weight_bytes == bytes_of_tensors(path, *FORMATS[name])
