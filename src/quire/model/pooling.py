"""Finds how a model's files make a text's vector or classes of its hidden states, if they define it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.lazy import Lazy
from quire.model.families import ENCODERS
from quire.model.families.classifiers import CLASSIFIERS
from quire.model.families.names import TensorNames
from quire.types import Pooling
from quire.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from quire.model import pooling_head
    from quire.model.pooling_head import PoolingHead
else:
    pooling_head = Lazy("quire.model.pooling_head")

# By the end of a class's name, the hidden states that its head reads.
SCORED: Mapping[str, Pooling] = {
    "ForSequenceClassification": "last",
    "ForTokenClassification": "all",
    "ForProcessRewardModel": "all",
    "ForRewardModel": "last",
}

HeadReader = Callable[[Checkpoint], "PoolingHead | None"]
"""Reads the pooling head of a model from a checkpoint of it."""


def read_pooling(
    directory: Path, config: Mapping[str, Any], architecture: str, names: TensorNames, checkpoint: Checkpoint
) -> PoolingHead | None:
    """Read the pooling that a model's files define; None if they define none and it is no encoder. ModelError."""
    classifier = CLASSIFIERS.get(architecture)
    if classifier is not None:
        return pooling_head.read_classifier(config, classifier, checkpoint)
    task = next((task for task in SCORED if architecture.endswith(task)), None)
    if task is not None:
        return pooling_head.read_scores(directory, config, checkpoint, names, task, SCORED[task])
    if config.get("architectures") == ["HF_ColBERT"]:
        return pooling_head.read_vectors_of_tokens(checkpoint)
    if (directory / "modules.json").is_file():
        return pooling_head.read_sentence_transformer(directory)
    encoder = architecture in ENCODERS
    return pooling_head.PoolingHead("cls", normalize=True) if encoder else None
