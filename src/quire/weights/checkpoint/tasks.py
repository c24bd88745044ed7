"""Checkpoints that hold low-rank changes for several tasks beside their weights (Jina embeddings v3, arXiv:2409.10173).

Each changed weight is stored as three tensors, as torch's parametrizations name them: the original, and lora_A and
lora_B with one matrix for each task. A task is chosen when the model is loaded; its change is added to each weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import ModelError
from quire.weights.checkpoint.protocol import Checkpoint, Unquantized
from quire.weights.tensor import Array

TASKS = "lora_adaptations"
TASK = "lora_task"  # Quire's own key of the config
DEFAULT = "text-matching"
BEFORE, AFTER = "parametrizations.weight", "weight"
MAX_TASKS, MAX_RANK = 64, 4096


class TaskCheckpoint(Unquantized):
    """A `Checkpoint` of plain names: weights with the change of one task, or the originals."""

    def __init__(self, inner: Checkpoint, task: int | None, count: int, rank: int, alpha: float) -> None:
        self._inner, self._task, self._count = inner, task, count
        self._rank, self._scale = rank, np.float32(alpha / rank)
        suffix = f".{BEFORE}.original"
        self._stored = {
            name.removesuffix(suffix) + f".{AFTER}" if name.endswith(suffix) else name: name
            for name in inner.names()
            if f".{BEFORE}.0.lora_" not in name
        }

    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._inner.shape(self._stored[name])

    def dtype(self, name: str) -> np.dtype[Any]:
        return self._inner.dtype(self._stored[name])

    def path(self, name: str) -> Path:
        return self._inner.path(self._stored[name])

    def get(self, name: str) -> Array:
        stored = self._stored[name]
        original = self._inner.get(stored)
        if self._task is None or stored == name:
            return original
        changed = original.astype(np.float32) + self._scale * self._change(stored, original.shape)
        return np.require(changed.astype(original.dtype), requirements=["C", "A"])

    def _change(self, stored: str, shape: tuple[int, ...]) -> Array:
        """The task's product of two matrices: B A for a projection, A B for a table of embeddings."""
        names = [f"{stored.removesuffix('.original')}.0.lora_{kind}" for kind in "AB"]
        missing = set(names) - set(self._inner.names())
        if missing or len(shape) != 2:
            raise ModelError(
                f"{self._inner.path(stored)}: {stored} needs {' and '.join(names)}, and two dimensions"
            )
        (outputs, inputs), r, count = shape, self._rank, self._count
        found = tuple(self._inner.shape(name) for name in names)
        assert self._task is not None
        if found not in (
            ((count, r, inputs), (count, outputs, r)),
            ((count, outputs, r), (count, r, inputs)),
        ):
            raise ModelError(
                f"{self._inner.path(stored)}: {names[0]} and B {found} do not fit {[outputs, inputs]}"
            )
        a, b = (self._inner.get(name)[self._task].astype(np.float32) for name in names)
        change: Array = b @ a if found[0][1:] == (r, inputs) and found[1][1:] == (outputs, r) else a @ b
        return change


def with_task(inner: Checkpoint, config: Mapping[str, Any], where: str) -> Checkpoint:
    """The checkpoint with the change of the config's task. ModelError."""
    tasks = config.get(TASKS)
    if not isinstance(tasks, list) or not 1 <= len(tasks) <= MAX_TASKS or not all(map(_is_text, tasks)):
        raise ModelError(f"{where}: {TASKS} must be a list of names, got {tasks!r:.200}")
    rank, alpha, task = config.get("lora_rank"), config.get("lora_alpha"), config.get(TASK, DEFAULT)
    if type(rank) is not int or not 1 <= rank <= MAX_RANK or not isinstance(alpha, (int, float)):
        raise ModelError(
            f"{where}: lora_rank and lora_alpha must be numbers, got {rank!r:.40} and {alpha!r:.40}"
        )
    if task is not None and task not in tasks:
        raise ModelError(
            f"{where}: {TASK} must be one of {', '.join(tasks)}, or null for none; got {task!r:.80}"
        )
    return TaskCheckpoint(inner, None if task is None else tasks.index(task), len(tasks), rank, alpha)


def _is_text(value: object) -> bool:
    return isinstance(value, str)
