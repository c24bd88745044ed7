"""Outlines a model from its config.json alone, for `quire plan --config`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import msgspec

from quire.devices.protocol import Backend, FloatArray, Matrix, WeightPacker
from quire.errors import ModelError
from quire.files import read_json
from quire.model.checkpoint import eos_ids, model_info
from quire.model.families import read_model, text_config
from quire.model.families.names import TensorNames
from quire.model.loaded import LoadedModel
from quire.model.packed_experts import experts_apart
from quire.model.packing import Packer, WeightTypes, own_quantization, wanted_of
from quire.model.parts.decoder import Decoder, DecoderConfig
from quire.model.parts.source import Piece, Use
from quire.model.shard import WHOLE, Shard
from quire.model.tensors import Tensors
from quire.progress import Told, untold
from quire.weights.parts import Part
from quire.weights.readers import Quantization as FoundQuantization
from quire.weights.readers import find_quantization
from quire.weights.readers.planned import PlannedCheckpoint
from quire.weights.schemes import Quantization
from quire.weights.tensor import FloatDtype


class Remembered(Tensors):
    """Finds each piece once: it is listed, then outlined."""

    def __init__(self, config: DecoderConfig, names: TensorNames) -> None:
        super().__init__(config, names)
        self._found: dict[Piece, Part] = {}

    def part(self, piece: Piece) -> Part:
        if piece not in self._found:
            self._found[piece] = super().part(piece)
        return self._found[piece]


@dataclass(frozen=True, slots=True)
class Outlined:
    """A `WeightSource` that outlines. Experts, and heads, of a layer with the same layouts share one outline."""

    tensors: Tensors
    packer: Packer
    made: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def matrix(self, path: str, pieces: Sequence[Piece], use: Use = "linear") -> Matrix:
        found: Matrix = self._once(path, pieces, lambda parts: self.packer.matrix(parts, use))
        return found

    def gated(self, path: str, gate: Piece, up: Piece) -> Matrix:
        found: Matrix = self._once(path, (gate, up), lambda parts: self.packer.gated(*parts))
        return found

    def vector(self, path: str, pieces: Sequence[Piece]) -> FloatArray:
        found: FloatArray = self._once(path, pieces, self.packer.vector)
        return found

    def _once(self, path: str, pieces: Sequence[Piece], make: Callable[[list[Part]], Any]) -> Any:
        parts = [self.tensors.part(piece) for piece in pieces]
        layer, found, expert = path.partition(".experts.")
        module, _, head = path.rpartition(".")
        if not found and not head.isdecimal():
            return make(parts)
        key: tuple[Any, ...] = (layer, expert.partition(".")[2]) if found else (module,)
        if (checkpoint := self.packer.checkpoint) is not None:
            names = [name for part in parts for name, _ in part.tensors]
            key += tuple((checkpoint.layout(name), checkpoint.rounding(name)) for name in names)
        if key not in self.made:
            self.made[key] = make(parts)
        return self.made[key]


class ConfigFiles:
    """A config.json in the place of a model's files (`ModelFiles`): it is outlined, and never loaded.

    One of floats is outlined as if it had the `assumed` quantization. `dtype` "auto" is the one that the config names;
    if it names none, bfloat16 for weights that a quantization packs, else float32.
    """

    ranks = 1

    def __init__(
        self,
        path: Path,
        dtype: str = "auto",
        quantized: Quantization | None = None,
        architecture: str | None = None,
        assumed: FoundQuantization | None = None,
    ) -> None:
        self._path, whole = path, read_json(path)
        spec, names = read_model(whole, str(path), architecture)
        config = text_config(whole, str(path)) or whole
        named = dtype if dtype != "auto" else _dtype(config)
        if named is None and (assumed is not None or config.get("quantization_config") is not None):
            named = "bfloat16"
        if dtype not in ("auto", *get_args(FloatDtype)):
            raise ModelError(f"dtype must be auto, float32, float16 or bfloat16, got {dtype!r}")
        kept: FloatDtype = (
            "bfloat16" if named == "bfloat16" else "float16" if named == "float16" else "float32"
        )
        found = find_quantization(whole, str(path), path.parent) or assumed
        if found is not None:
            names = msgspec.structs.replace(names, transposed=False)
            if names.expert_stack and found.method != "mxfp4":
                names = experts_apart(names)
        self._tensors, self._planned = Remembered(spec, names), None
        wanted = wanted_of(self._tensors)
        if found is not None:
            shapes = {name: tensor.shape for name, tensor in wanted.items()}
            own = _dtype(config) or _dtype(whole)
            self._planned = PlannedCheckpoint(path, found.method, found.settings, shapes, str(own))
            if dtype != "float32":
                quantized = own_quantization(dtype, wanted, self._planned, quantized)
        self._types = WeightTypes.of(kept, quantized)
        self.info = model_info(
            path.parent, spec, wanted, kept, quantized, eos_ids({}, config, str(path), spec.vocab_size), {}
        )

    def outline(self, backend: Backend, shard: Shard = WHOLE) -> LoadedModel:
        spec, names = self._tensors.config, self._tensors.names
        spec.check_share(shard)
        packer = Packer(self._planned, backend, self._types, outline=True)
        return LoadedModel(
            self.info, Decoder(spec, Outlined(self._tensors, packer), shard), names=names, shard=shard
        )

    def load(self, backend: WeightPacker, shard: Shard = WHOLE, told: Told = untold) -> LoadedModel:
        raise ModelError(f"{self._path} alone has no weights: give the model")


def _dtype(config: dict[str, Any]) -> Any:
    return config.get("torch_dtype") or config.get("dtype")
