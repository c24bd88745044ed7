"""Outlines a model from its config.json alone, for `quire plan --config`."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec

from quire.devices.protocol import Backend
from quire.errors import ModelError
from quire.files import read_json
from quire.model.checkpoint import eos_ids, model_info
from quire.model.families import read_model, text_config
from quire.model.families.names import TensorNames
from quire.model.loaded import LoadedModel
from quire.model.packed_experts import experts_apart
from quire.model.packing import WeightTypes, outline_weights, own_quantization, wanted_tensors
from quire.model.parts.decoder import DecoderConfig
from quire.weights.checkpoint import Checkpoint
from quire.weights.readers import Quantization as Quantized
from quire.weights.readers import find_quantization
from quire.weights.readers.planned import PlannedCheckpoint
from quire.weights.schemes import Quantization
from quire.weights.tensor import FloatDtype


def outline_config(
    path: Path,
    backend: Backend,
    dtype: str = "auto",
    quantized: Quantization | None = None,
    architecture: str | None = None,
) -> LoadedModel:
    """Outline a model from its config.json.

    `dtype` "auto" is the one that the config names; if it names none, bfloat16 for weights that a quantization
    packs, else float32.
    """
    config = read_json(path)
    spec, names = read_model(config, str(path), architecture)
    config = text_config(config, str(path)) or config
    named = dtype if dtype != "auto" else config.get("torch_dtype") or config.get("dtype")
    if named is None and config.get("quantization_config") is not None:
        named = "bfloat16"
    if dtype not in ("auto", *get_args(FloatDtype)):
        raise ModelError(f"dtype must be auto, float32, float16 or bfloat16, got {dtype!r}")
    kept: FloatDtype = "bfloat16" if named == "bfloat16" else "float16" if named == "float16" else "float32"
    found = find_quantization(read_json(path), str(path), path.parent)
    if found is not None:
        names = msgspec.structs.replace(names, transposed=False)
        if names.expert_stack and found.method != "mxfp4":
            names = experts_apart(names)
    planned = _planned(path, found, spec, names)
    if planned is not None and dtype != "float32":
        quantized = own_quantization(dtype, wanted_tensors(spec, names), planned, quantized)
    info = model_info(
        path.parent, spec, names, kept, quantized, eos_ids({}, config, str(path), spec.vocab_size), {}
    )
    decoder = outline_weights(spec, names, backend, WeightTypes.of(kept, quantized), planned)
    return LoadedModel(info, decoder)


def _planned(
    path: Path, found: Quantized | None, spec: DecoderConfig, names: TensorNames
) -> Checkpoint | None:
    """Predict the layouts that a config's quantization gives its weights; None if they are plain."""
    if found is None:
        return None
    tensors = {name: tensor.shape for name, tensor in wanted_tensors(spec, names).items()}
    config = read_json(path)
    inner = text_config(config, str(path)) or config
    named = inner.get("torch_dtype") or inner.get("dtype") or config.get("torch_dtype") or config.get("dtype")
    return PlannedCheckpoint(path, found.method, found.settings, tensors, str(named))
