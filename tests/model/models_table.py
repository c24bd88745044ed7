"""The table of decoders in docs/models.md, from the families and from what the tests check.

`python -m tests.model.models_table` prints it; tests/model/test_models_page.py compares the page with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import transformers

from quire.devices.protocol import FloatArray
from quire.errors import ModelError
from quire.model.adapter import AdapterBase, AdapterSource
from quire.model.adapter_names import Pair
from quire.model.families import DECODERS, MODEL_TYPES, load_family, read_model
from quire.model.families.names import TensorNames
from quire.model.packing import wanted_tensors
from quire.model.parts.decoder import Decoder, DecoderConfig
from quire.model.parts.source import Listing, Piece, Use
from quire.weights.parts import Part
from tests.model.tiny_models import FAMILIES, VARIANTS

ROOT = Path(__file__).parents[2]
HEAD = (
    "| architecture | model_type | models | runs | verified against | quantized checkpoints | GGUF | own drafts | "
    "adapters |\n|---|---|---|---|---|---|---|---|---|\n"
)
OTHERS = (
    "| any other causal language model of `transformers` | | those whose layers keep keys and values alone | "
    "through `quire-llm[transformers]` | itself, at each start | none | no | | none |\n"
)
# Compared with another class of transformers, or with its weights under other names.
KIN = {
    "DeciLMForCausalLM": "Llama",
    "MiMoForCausalLM": "Qwen2",
    "MiniMaxM3ForCausalLM": "MiniMaxM3VLText",
    "BailingMoeForCausalLM": "AriaText",
    "BailingMoeV2ForCausalLM": "Glm4Moe",
    "Step3p5ForCausalLM": "Step3p7",
}


def tiny_config(family: str) -> dict[str, Any]:
    """The config of a tiny model of the tests, or of the language model in it, as transformers writes it."""
    name, common = FAMILIES[family]
    own = next(options for kind, options in VARIANTS.values() if kind == family)
    config = getattr(transformers, f"{name}Config")(**{**common, **own})
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    inner: dict[str, Any] = values.get("text_config", values)
    return inner


def checked() -> dict[str, str]:
    """The family of tiny models that checks each class."""
    found = {}
    for family in FAMILIES:
        name = MODEL_TYPES.get(tiny_config(family)["model_type"])
        if name in DECODERS:
            found[name] = family
    return found


def gguf_classes() -> set[str]:
    """The classes that the readers of GGUF architectures name."""
    sources = (ROOT / "src" / "quire" / "model" / "gguf").glob("*.py")
    return {
        name
        for path in sources
        for name in re.findall(r'"(\w+(?:ForCausalLM|LMHeadModel))"', path.read_text())
    }


class Everything:
    """An adapter that changes each module of a base: the tensors of `AdapterNames`, without values."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def pair(self, module: str, embedding: bool = False, transposed: bool = False) -> Pair | None:
        shape = self._shapes.get(f"{module}.weight")
        if shape is None or len(shape) != 2 or embedding:
            return None
        outputs, inputs = shape[::-1] if transposed else shape
        return Pair(np.ones((1, inputs), np.float32), np.ones((outputs, 1), np.float32))

    def stacked(self, part: Part, module: str) -> tuple[None, None]:
        return None, None  # experts in one tensor are taken apart by AdapterNames

    def whole(self, name: str, shape: tuple[int, ...]) -> None:
        return None

    def token_rows(self, module: str, shape: tuple[int, ...]) -> None:
        return None


class Refusals(AdapterSource):
    """A source of changes that notes the modules that cannot be changed."""

    def __init__(self, spec: DecoderConfig, names: TensorNames) -> None:
        shapes = {name: tensor.shape for name, tensor in wanted_tensors(spec, names).items()}
        files: Any = SimpleNamespace(path="", modules={}, whole={}, tokens={}, copies={}, start=None)
        decoder = Decoder(spec, Listing())
        super().__init__(AdapterBase(decoder, names, *cast(Any, [None] * 3)), files)
        self.names = cast(Any, Everything(shapes))
        self.refused: set[str] = set()

    def vector(self, path: str, pieces: Sequence[Piece]) -> FloatArray:
        return np.zeros(sum(piece.own_shape[0] for piece in pieces), np.float32)

    def _draft(self, parts: Sequence[Part], use: Use) -> Any:
        try:
            return super()._draft(parts, use)
        except ModelError:
            modules = {
                name.removesuffix(".weight").rpartition(".")[2] for part in parts for name, _ in part.tensors
            }
            self.refused |= modules
            return None


def adapters(spec: DecoderConfig, names: TensorNames) -> str:
    """The modules that an adapter may change."""
    source = Refusals(spec, names)
    Decoder(spec, source)
    return f"all but {', '.join(sorted(source.refused))}" if source.refused else "all"


def facts(name: str, family: str | None) -> tuple[str, str, str]:
    """Which quantized matrices are read, whether a layer of the checkpoint drafts, and what adapters change."""
    if family is None:
        return "all", "", "all"
    spec, names = read_model({**tiny_config(family), "architectures": [name]})
    after = names.is_ignored(f"{names.layer.format(i=spec.num_layers)}eh_proj.weight")
    drafts = (after or names["further"]) and spec.stream_width == spec.hidden_size
    return "all", "MTP" if drafts else "", adapters(spec, names)


def markdown() -> str:
    """A row for each family, in the order of the registry, and one for all that is not a family."""
    by_class, gguf = checked(), gguf_classes()
    kinds = {name: kind for kind, name in MODEL_TYPES.items()}
    rows = []
    for name in DECODERS:
        family, tiny = load_family(name), by_class.get(name)
        against = f"transformers ({KIN[name]})" if name in KIN else "transformers" if tiny else "its config"
        readers, drafts, changed = facts(name, tiny)
        in_gguf = "yes" if name in gguf else "no"
        known = name, kinds[name], family.models, "natively"
        rows.append(f"| {' | '.join((*known, against, readers, in_gguf, drafts, changed))} |\n")
    return HEAD + "".join(rows) + OTHERS


if __name__ == "__main__":
    print(markdown(), end="")
