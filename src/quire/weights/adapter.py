"""Reads adapters in the layout of PEFT: adapter_config.json beside adapter_model.safetensors or .bin.

Only headers are read at first; `AdapterFiles.values` reads one tensor. The files are untrusted: patterns are matched in
linear time, and no size is taken from the config's word. Knows no model.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from quire.errors import ModelError
from quire.files import open_regular, read_json
from quire.weights.checkpoint import Checkpoint
from quire.weights.checkpoint.protocol import MAX_TENSORS
from quire.weights.checkpoint.safetensors import SafetensorsFile
from quire.weights.checkpoint.torch_pickle import TorchFile
from quire.weights.expressions import Expressions
from quire.weights.tensor import FloatArray

CONFIG = "adapter_config.json"
MAX_CONFIG = 4 << 20  # bytes; EVA lists the rank of every module
MAX_PATTERNS = 4096
MAX_TOKENS = 1024  # trained rows of the embedding
READ = 1 << 20  # bytes hashed at a time
WEIGHTS: tuple[tuple[str, Callable[[Path, int], Checkpoint]], ...] = (
    ("adapter_model.safetensors", SafetensorsFile),
    ("adapter_model.bin", TorchFile),
    ("adapter_model.pt", TorchFile),
)
FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
LORA = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(\.(?!weight$|bias$)[^.]+)?(?P<kind>\.weight|\.bias)?"
)
SAVED = re.compile(r"(?P<module>.+)\.modules_to_save(\.[^.]+)?\.(?P<kind>weight|bias)")
TOKENS = re.compile(r"(?P<module>.+?)(\.token_adapter)?\.trainable_tokens_delta(\.[^.]+)?")
PREFIX = "base_model.model."
# Features that change what an adapter computes and are not read.
REFUSED = (
    "alora_invocation_tokens",
    "layer_replication",
    "use_bdlora",
    "use_qalora",
    "arrow_config",
    "velora_config",
)
# PLAIN_STARTS of training leave the base as it is; others change it.
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica", "lora_ga", "loftq")


@dataclass(frozen=True, slots=True)
class LowRank:
    """One module's tensors by role: A [r, in], B [out, r] and, if there are, a magnitude [out] and a bias [out] of B.

    Of an embedding A is [r, V]. Of stacked experts A is [E r, in], B [out, r E]; `rank` is r. y += scale * (B A x + b).
    """

    tensors: Mapping[str, str]
    rank: int
    scale: float
    embedding: bool


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter before its values are read. Modules and tensors have the base's names.

    `whole` are tensors that replace the base's. `tokens` are rows of an embedding by module: ids, and the tensor of the
    new rows. `start` is "pissa" or "olora" if training subtracted initial factors from the base. `digest` is a hash of
    the files. With `outlined` all values are zeros, and none are read.
    """

    path: Path
    base: str
    modules: Mapping[str, LowRank]
    whole: Mapping[str, str]
    copies: Mapping[str, str]
    tokens: Mapping[str, tuple[tuple[int, ...], str]]
    start: str
    magnitudes: bool
    digest: str
    checkpoint: Checkpoint = field(repr=False)
    outlined: bool = False

    def outline(self) -> AdapterFiles:
        """The same without values."""
        return replace(self, start="", outlined=True)

    def shape(self, tensor: str) -> tuple[int, ...]:
        return self.checkpoint.shape(tensor)

    def values(self, tensor: str) -> FloatArray:
        """A tensor as float32. ModelError if a value is not finite."""
        if self.outlined:
            return np.zeros(self.shape(tensor), np.float32)
        found: FloatArray = np.array(self.checkpoint.get(tensor), np.float32)
        if not np.isfinite(found).all():
            raise ModelError(f"{self.path}: tensor {tensor} holds values that are not finite")
        return found


def open_adapter(path: Path, max_rank: int, most: int = MAX_TENSORS) -> AdapterFiles:
    """Open a directory of at most `most` tensors and check all but values. ModelError names file, field or tensor."""
    if not (path / CONFIG).is_file():
        raise ModelError(f"{path}: no {CONFIG}; give the directory of an adapter in PEFT's layout")
    config = _Config(path, read_json(path / CONFIG, most=MAX_CONFIG))
    config.check(max_rank)
    weights, opener = _weights(path)
    checkpoint = opener(weights, most)
    tensors = _sorted(weights, checkpoint)
    loras = {
        module: _low_rank(path, config, module, parts, checkpoint) for module, parts in tensors.loras.items()
    }
    if not loras and not tensors.whole and not tensors.tokens:
        raise ModelError(f"{weights}: holds no tensor of an adapter")
    return AdapterFiles(
        path=path,
        base=config.base,
        modules=loras,
        whole=tensors.whole,
        copies=tensors.copies,
        tokens={module: (config.tokens_of(module), name) for module, name in tensors.tokens.items()},
        start=config.start,
        magnitudes=config.use_dora,
        digest=_digest(path / CONFIG, weights),
        checkpoint=checkpoint,
    )


def table_rows(path: Path) -> int:
    """Count the tokens of the largest table that an adapter replaces or trains rows of; 0: none. ModelError."""
    config = _Config(path, read_json(path / CONFIG, most=MAX_CONFIG))
    weights, opener = _weights(path)
    checkpoint = opener(weights, MAX_TENSORS)
    found = _sorted(weights, checkpoint)
    shapes = [checkpoint.shape(name) for name in (*found.whole.values(), *found.copies.values())]
    rows = [shape[0] for shape in shapes if len(shape) == 2]
    return max([0, *rows, *(1 + max(config.tokens_of(module)) for module in found.tokens)])


def _weights(path: Path) -> tuple[Path, Callable[[Path, int], Checkpoint]]:
    found = [(path / name, opener) for name, opener in WEIGHTS if (path / name).exists()]
    if not found:
        raise ModelError(f"{path}: no weights found; looked for {', '.join(name for name, _ in WEIGHTS)}")
    return found[0]


@dataclass(frozen=True, slots=True)
class _Tensors:
    """Names in the file by what they are: parts of low-rank modules, whole tensors, copies of the base, token rows."""

    loras: dict[str, dict[str, str]] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)


def _sorted(path: Path, checkpoint: Checkpoint) -> _Tensors:
    """Sort the tensors by their names. ModelError for a name or type that no adapter has."""
    found = _Tensors()
    for name in checkpoint.names():
        if not NAME.fullmatch(name):
            raise ModelError(f"{path}: {name!r:.200} is no name of a tensor")
        if checkpoint.dtype(name) not in FLOATS:
            raise ModelError(
                f"{path}: tensor {name} is {checkpoint.dtype(name)}; supported are {', '.join(map(str, FLOATS))}"
            )
        _sort(path, found, name, name.removeprefix(PREFIX))
    return found


def _sort(path: Path, found: _Tensors, name: str, own: str) -> None:
    lora, saved, tokens = LORA.fullmatch(own), SAVED.fullmatch(own), TOKENS.fullmatch(own)
    if lora is not None:
        places: dict[str, str] = found.loras.setdefault(lora["module"], {})
        key = lora["part"] + (".bias" if lora["kind"] == ".bias" else "")
    elif tokens is not None:
        places, key = found.tokens, tokens["module"]
    elif saved is not None:
        places, key = found.whole, f"{saved['module']}.{saved['kind']}"
    elif own.endswith(".base_layer.weight"):
        places, key = found.copies, own.replace(".base_layer.", ".")
    else:
        places, key = found.whole, own.replace(".base_layer.", ".")
    if key in places:
        raise ModelError(f"{path}: tensors {places[key]} and {name} are the same part of the adapter")
    places[key] = name


def _low_rank(
    path: Path, config: _Config, module: str, parts: dict[str, str], checkpoint: Checkpoint
) -> LowRank:
    where = f"{path}: module {module}"
    embedding = any(part.startswith("lora_embedding") for part in parts)
    names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")
    allowed = {*names, "lora_magnitude_vector", "lora_B.bias"}
    if missing := [part for part in names if part not in parts]:
        raise ModelError(f"{where} has no {missing[0]}")
    if surplus := [part for part in parts if part not in allowed]:
        raise ModelError(f"{where} has both {names[0]} and {surplus[0]}")
    if ("lora_magnitude_vector" in parts) != config.use_dora:
        what = "has no lora_magnitude_vector" if config.use_dora else "has a lora_magnitude_vector"
        raise ModelError(f"{where} {what}, and use_dora is {str(config.use_dora).lower()}")
    if ("lora_B.bias" in parts) != (config.lora_bias and not embedding):
        raise ModelError(f"{where}: lora_bias is {str(config.lora_bias).lower()}, and its tensors differ")
    rank, scale = config.rank_and_scale(module)
    shapes = [checkpoint.shape(parts[name]) for name in names]
    if any(len(shape) != 2 or 0 in shape for shape in shapes):
        raise ModelError(f"{where}: A and B must be matrices, got shapes {[list(shape) for shape in shapes]}")
    stacked = not embedding and shapes[0][0] != rank and re.search(r"\.experts(\.|$)", f"{module}.")
    experts = shapes[0][0] // rank if stacked else 1
    if shapes[0][0] != rank * experts or shapes[1][1] != rank * experts:
        raise ModelError(
            f"{where}: A is {list(shapes[0])} and B {list(shapes[1])}, but {CONFIG} says rank {rank}"
        )
    tensors = {part.removeprefix("lora_").removeprefix("embedding_"): name for part, name in parts.items()}
    return LowRank(tensors, rank, scale, embedding)


class _Config:
    """adapter_config.json. Raises ModelError, naming the field."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self._where, self._values = path / CONFIG, values
        kind = values.get("peft_type")
        if kind != "LORA":
            raise ModelError(f"{self._where}: peft_type {kind!r:.100} is not supported: only LORA is")
        for name in REFUSED:
            if values.get(name):
                raise ModelError(f"{self._where}: {name} is not supported")
        self.base = str(values.get("base_model_name_or_path") or "")
        self.use_dora, self.lora_bias = self._flag("use_dora"), self._flag("lora_bias")
        self._rslora = self._flag("use_rslora")
        if self.use_dora and self.lora_bias:
            raise ModelError(f"{self._where}: use_dora with lora_bias is not supported")
        self.start = self._start(values.get("init_lora_weights"))
        self._rank: Any = values.get("r")
        self._alpha: Any = values.get("lora_alpha")
        self._ranks, self._rank_of = self._patterns("rank_pattern")
        self._alphas, self._alpha_of = self._patterns("alpha_pattern")

    def check(self, max_rank: int) -> None:
        for rank in (self._rank, *self._ranks):
            if type(rank) is not int or rank < 1:
                raise ModelError(f"{self._where}: r must be an integer of at least 1, got {rank!r:.100}")
            if rank > max_rank:
                raise ModelError(
                    f"{self._where}: rank {rank} is above --max-lora-rank {max_rank}: raise it to load this adapter"
                )
        for alpha in (self._alpha, *self._alphas):
            if type(alpha) not in (int, float) or not math.isfinite(alpha):
                raise ModelError(f"{self._where}: lora_alpha must be a finite number, got {alpha!r:.100}")

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """Find a module's rank and scale; the first pattern that matches decides, as in PEFT."""
        if module.endswith(".experts.base_layer"):
            module = module.removesuffix("base_layer") + "gate_up_proj"
        elif module.endswith(".experts"):
            module += ".down_proj"
        by_rank, by_alpha = self._rank_of.first(module), self._alpha_of.first(module)
        rank = self._rank if by_rank is None else self._ranks[by_rank]
        alpha = self._alpha if by_alpha is None else self._alphas[by_alpha]
        return rank, alpha / (math.sqrt(rank) if self._rslora else rank)

    def tokens_of(self, module: str) -> tuple[int, ...]:
        given: Any = self._values.get("trainable_token_indices")
        if isinstance(given, dict):
            given = next((ids for name, ids in given.items() if f".{module}".endswith(f".{name}")), None)
        valid = isinstance(given, list) and all(type(token) is int and token >= 0 for token in given)
        if not valid or not 0 < len(given) <= MAX_TOKENS or len(set(given)) < len(given):
            raise ModelError(
                f"{self._where}: trainable_token_indices must list up to {MAX_TOKENS} different token ids for {module}"
            )
        return tuple(given)

    def _flag(self, name: str) -> bool:
        value = self._values.get(name) or False
        if not isinstance(value, bool):
            raise ModelError(f"{self._where}: {name} must be true or false, got {value!r:.100}")
        return value

    def _start(self, value: Any) -> str:
        if value in PLAIN_STARTS:
            return ""
        if value == "olora":
            return "olora"
        if isinstance(value, str) and re.fullmatch(r"pissa(_niter_\d+)?", value):
            return "pissa"
        raise ModelError(
            f"{self._where}: init_lora_weights {value!r:.100} is not supported: convert the adapter"
        )

    def _patterns(self, name: str) -> tuple[list[Any], Expressions]:
        patterns = self._values.get(name) or {}
        if not isinstance(patterns, dict) or len(patterns) > MAX_PATTERNS:
            raise ModelError(f"{self._where}: {name} must be an object of at most {MAX_PATTERNS} patterns")
        written = (rf"(.*\.)?({pattern})$" for pattern in patterns)
        return list(patterns.values()), Expressions(written, f"{self._where}: {name}")


def _digest(*paths: Path) -> str:
    """Hash the files: adapters with the same digest answer the same."""
    total = hashlib.sha256()
    for path in paths:
        with open_regular(path) as file:
            own = hashlib.sha256()
            for data in iter(partial(file.read, READ), b""):
                own.update(data)
        total.update(own.digest())
    return total.hexdigest()
