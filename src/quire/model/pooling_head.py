"""Turns a text's hidden states into its vector or classes: the steps after a model's last layer.

Read from a sentence-transformers directory (modules.json) or a classifier's checkpoint. One vector per text is little
work, so plain numpy in float64 does it, and no result depends on the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quire.devices.protocol import Activation, Norm
from quire.devices.vectors import activate, normalize
from quire.errors import ModelError
from quire.files import read_json
from quire.model.families.classifiers import ClassifierNames
from quire.model.families.names import TensorNames
from quire.text.tokenizer import Tokenizer
from quire.types import Pooling
from quire.weights.checkpoint import Checkpoint, open_checkpoint

Vector = NDArray[np.float64]
Scores = Literal["softmax", "sigmoid", "identity"]
CLASSIFIER_POOLING: Mapping[str, Pooling] = {"cls": "cls", "bos": "cls", "mean": "mean", "late": "mean"}
ROWS: Mapping[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
ACTIVATIONS: Mapping[str, Activation | Literal["tanh"] | None] = {
    "Identity": None,
    "Tanh": "tanh",
    "GELU": "gelu",
    "ReLU": "relu",
    "SiLU": "silu",
}


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """activation(weight x + bias): weight [O, K], bias [O]."""

    weight: Vector
    bias: Vector | None
    activation: Activation | Literal["tanh"] | None

    def __call__(self, x: Vector) -> Vector:
        y: Vector = self.weight @ x if self.bias is None else self.weight @ x + self.bias
        if self.activation is None:
            return y
        return np.tanh(y) if self.activation == "tanh" else activate(self.activation, y)


@dataclass(frozen=True, slots=True, eq=False)
class PoolingHead:
    """`rows` selects hidden states; `steps` are applied to their mean, in order, or with `late` to each of them before.

    `scores` turns a classifier's outputs into probabilities; None if the vector is an embedding. `labels` names a
    classifier's outputs.
    """

    rows: Pooling
    steps: tuple[Dense | Norm, ...] = ()
    normalize: bool = False
    scores: Scores | None = None
    labels: tuple[str, ...] = ()
    late: bool = False

    def each(self, hidden_D: Vector) -> Vector:
        """Give what is averaged over tokens: a token's hidden state, or its outputs."""
        return self._stepped(hidden_D) if self.late else hidden_D

    def __call__(self, pooled_D: Vector, activate: bool = True) -> list[float]:
        """Compute the vector of a text: an embedding, or the classifier's outputs before any softmax.

        Without `activate`, an embedding keeps its length.
        """
        x = pooled_D if self.late else self._stepped(pooled_D)
        if self.normalize and activate:
            x = x / max(float(np.sqrt((x * x).sum())), 1e-12)
        vector: list[float] = x.tolist()
        return vector

    def _stepped(self, x: Vector) -> Vector:
        for step in self.steps:
            x = normalize(x, step) if isinstance(step, Norm) else step(x)
        return x


def read_scores(
    directory: Path,
    config: Mapping[str, Any],
    checkpoint: Checkpoint,
    names: TensorNames,
    task: str,
    rows: Pooling,
) -> PoolingHead:
    """Read the matrix from hidden states to scores, or a reward model's two with a ReLU between them.

    `task` ends the name of the model's class; `rows` are what it scores.
    """
    present = set(checkpoint.names())
    if "score.0.weight" in present:
        steps = [_dense(checkpoint, "score.0", "relu"), _dense(checkpoint, "score.2", None)]
    elif "classifier.weight" in present:
        steps = [_dense(checkpoint, "classifier", None)]
    elif "score.weight" not in present and config.get("classifier_from_token"):
        steps = [_from_tokens(directory, config["classifier_from_token"], checkpoint, names)]
    else:
        steps = [_dense(checkpoint, "score", None)]
    outputs = len(steps[-1].weight)
    scores: Scores = "identity" if "Reward" in task else _scores(config, outputs)
    return PoolingHead(rows, tuple(steps), scores=scores, labels=_labels(config, outputs))


def _from_tokens(directory: Path, tokens: Any, checkpoint: Checkpoint, names: TensorNames) -> Dense:
    """Take the head's rows of the tokens, as scores; two tokens make one score, the second's over the first's.

    So a decoder that answers no or yes is a reranker (Qwen3-Reranker, arXiv:2506.05176).
    """
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ModelError(f"classifier_from_token must be a list of tokens, got {tokens!r:.80}")
    tokenizer = Tokenizer.load(directory)
    ids = [-1 if (found := tokenizer.token_to_id(token)) is None else found for token in tokens]
    if -1 in ids:
        raise ModelError(f"classifier_from_token: {tokens[ids.index(-1)]!r} is no token of {directory}")
    head = f"{names['head']}.weight"
    whole = checkpoint.get(head if head in set(checkpoint.names()) else f"{names['embedding']}.weight")
    rows: Vector = whole[ids].astype(np.float64)
    return Dense(rows[1:] - rows[:1] if len(ids) == 2 else rows, None, None)


def read_vectors_of_tokens(checkpoint: Checkpoint) -> PoolingHead:
    """Read the head of a model that makes a vector of each token, as ColBERT does."""
    return PoolingHead("all", (_dense(checkpoint, "linear", None),), normalize=True)


def _labels(config: Mapping[str, Any], outputs: int) -> tuple[str, ...]:
    labels = config.get("id2label")
    labels = labels if isinstance(labels, dict) else {}
    return tuple(str(labels.get(str(i), f"LABEL_{i}")) for i in range(outputs))


def read_classifier(config: Mapping[str, Any], names: ClassifierNames, checkpoint: Checkpoint) -> PoolingHead:
    """Read the head of a classifier: a dense layer, perhaps a norm, and a matrix to its labels."""
    present = set(checkpoint.names())
    dense = names.dense if f"{names.dense}.weight" in present else names.dense.partition(".")[2]
    steps: list[Dense | Norm] = [_dense(checkpoint, dense, names.activation)]
    if names.norm is not None:
        weight = _tensor(checkpoint, f"{names.norm}.weight").astype(np.float32)
        steps.append(Norm("layer", weight, None, float(config.get("norm_eps", 1e-5))))
    steps.append(_dense(checkpoint, names.out, None))
    outputs = len(_tensor(checkpoint, f"{names.out}.weight"))
    rows = config.get("classifier_pooling", names.pooling)
    if rows not in CLASSIFIER_POOLING:
        raise ModelError(f"classifier_pooling must be one of {', '.join(CLASSIFIER_POOLING)}, got {rows!r}")
    return PoolingHead(
        rows=CLASSIFIER_POOLING[rows],
        steps=tuple(steps),
        scores=_scores(config, outputs),
        labels=_labels(config, outputs),
        late=rows == "late",
    )


def _scores(config: Mapping[str, Any], outputs: int) -> Scores:
    """Choose the function of a cross-encoder's config; otherwise a sigmoid for one output, a softmax for several."""
    own = config.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, dict) else None
    named = named or config.get("sbert_ce_default_activation_function")
    if named is not None:
        kinds: dict[str, Scores] = {"Identity": "identity", "Sigmoid": "sigmoid"}
        kind = kinds.get(str(named).rpartition(".")[2])
        if kind is None:
            raise ModelError(f"config.json: activation {named!r} of the classifier is not understood")
        return kind
    kind_of_problem = config.get("problem_type")
    if kind_of_problem == "regression":
        return "identity"
    several = kind_of_problem == "multi_label_classification"
    return "sigmoid" if outputs == 1 or several else "softmax"


def read_sentence_transformer(directory: Path) -> PoolingHead:
    """Read the modules after the transformer, which must be in the directory itself."""
    modules = _modules(directory)
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or modules[0].get("path"):
        raise ModelError(
            f"{directory}: modules.json must begin with a Transformer in the directory itself and a Pooling"
        )
    rows = _pooled_rows(_inside(directory, modules[1]) / "config.json")
    steps: list[Dense | Norm] = []
    scaled = False
    for kind, module in zip(kinds[2:], modules[2:], strict=True):
        if kind == "Dense" and not scaled:
            steps.append(_read_dense(_inside(directory, module)))
        elif kind == "Normalize":
            scaled = True
        else:
            raise ModelError(f"{directory}: modules.json: a {kind} in that place is not supported")
    return PoolingHead(rows, tuple(steps), scaled)


def _modules(directory: Path) -> list[dict[str, Any]]:
    wrapped = read_json(directory / "modules.json", of=list)
    if not all(isinstance(module, dict) for module in wrapped):
        raise ModelError(f"{directory / 'modules.json'}: must be a list of modules")
    modules: list[dict[str, Any]] = wrapped
    return modules


def _inside(directory: Path, module: Mapping[str, Any]) -> Path:
    path = module.get("path")
    if not isinstance(path, str) or path in (".", "..") or "/" in path or "\\" in path:
        raise ModelError(f"{directory}: modules.json must name folders beside it, got {path!r}")
    return directory / path


def _pooled_rows(path: Path) -> Pooling:
    config = read_json(path)
    modes = [
        key.removeprefix("pooling_mode_").removesuffix("_token").removesuffix("_tokens")
        for key, value in config.items()
        if key.startswith("pooling_mode_") and value is True
    ]
    if isinstance(config.get("pooling_mode"), str):
        modes = [config["pooling_mode"]]
    if len(modes) != 1 or modes[0] not in ROWS:
        raise ModelError(f"{path}: supported is one of {', '.join(ROWS)}, got {', '.join(modes) or 'none'}")
    return ROWS[modes[0]]


def _read_dense(directory: Path) -> Dense:
    config = read_json(directory / "config.json")
    name = str(config.get("activation_function", "Identity")).rpartition(".")[2]
    if name not in ACTIVATIONS:
        raise ModelError(f"{directory}: activation {name} is not supported; {', '.join(ACTIVATIONS)} are")
    return _dense(open_checkpoint(directory), "linear", ACTIVATIONS[name])


def _dense(checkpoint: Checkpoint, name: str, activation: Activation | Literal["tanh"] | None) -> Dense:
    weight = _tensor(checkpoint, f"{name}.weight")
    bias = _tensor(checkpoint, f"{name}.bias") if f"{name}.bias" in set(checkpoint.names()) else None
    if weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise ModelError(f"{checkpoint.path(f'{name}.weight')}: {name} is not a matrix with its bias")
    return Dense(weight, bias, activation)


def _tensor(checkpoint: Checkpoint, name: str) -> Vector:
    if name not in set(checkpoint.names()):
        raise ModelError(f"missing tensor {name}; the checkpoint does not match config.json")
    return checkpoint.get(name).astype(np.float64)
