"""Python logits processors: the classes of vLLM that an engine runs between the forward pass and sampling.

Logits are numpy arrays here, float32 [rows, vocabulary]; a processor may change them in place. Each sequence that a
processor concerns has an instance of its own while it runs, so `apply` sees one row and an error ends one request.
Instances are reused: `update_state` announces the end of one sequence and the start of the next.
"""

from __future__ import annotations

import enum
import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError
from quire.params import SamplingParams

Row = NDArray[np.float32]
RequestLogitsProcessor = Callable[..., Any]
"""A function of (output token ids, row) or (prompt token ids, output token ids, row) that returns the new row."""


class MoveDirectionality(enum.Enum):
    UNIDIRECTIONAL = enum.auto()
    SWAP = enum.auto()


AddedRequest = tuple[int, SamplingParams, "list[int] | None", list[int]]
MovedRequest = tuple[int, int, MoveDirectionality]


@dataclass(frozen=True, slots=True)
class BatchUpdate:
    """How the rows of a processor change before its next `apply`.

    `added` holds (row, parameters, prompt token ids, output token ids); the last list grows as tokens are drawn.
    """

    batch_size: int
    removed: Sequence[int] = ()
    added: Sequence[AddedRequest] = ()
    moved: Sequence[MovedRequest] = ()


class LogitsProcessor(ABC):
    """A processor of a whole engine (`LLM(logits_processors=[...])`, `--logits-processors module:Class`)."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError for parameters that the processor cannot accept."""
        return

    @classmethod
    def concerns(cls, sampling_params: SamplingParams) -> bool:
        """Whether the processor changes the logits of such a request. Others run as if there were none."""
        return True

    def __init__(self, vllm_config: Any, device: str, is_pin_memory: bool) -> None:  # noqa: B027
        """`vllm_config` is the EngineConfig; `device` is "cpu"."""

    @abstractmethod
    def apply(self, logits: Row) -> Row:
        """The logits [rows, V] to sample from."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether `apply` never changes which logit is the largest: greedy requests then skip it."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before each `apply`; None if the rows are the same as in the last call."""


class AdapterLogitsProcessor(LogitsProcessor):
    """Turns functions of one request into a processor of the engine."""

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The function for a request with these parameters; None if it has none."""

    def is_argmax_invariant(self) -> bool:
        return False

    def apply(self, logits: Row) -> Row:
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """The engine runs the function itself."""


ProcessorClass = type[Any]


def load_processors(names: Sequence[str | ProcessorClass]) -> tuple[ProcessorClass, ...]:
    """The classes that names of the form module:Class (or module.Class) stand for; classes stay as they are.

    Raises ConfigError if one cannot be imported or lacks a method.
    """
    return tuple(
        _checked(load_object(name, "--logits-processors") if isinstance(name, str) else name)
        for name in names
    )


def load_object(name: str, flag: str) -> Any:
    """The object that `name` (module:attribute or module.attribute) stands for. Raises ConfigError naming the flag."""
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise ConfigError(f"{flag} {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    return found


def _checked(kind: Any) -> ProcessorClass:
    missing = [
        name
        for name in ("apply", "update_state", "is_argmax_invariant")
        if not callable(getattr(kind, name, None))
    ]
    if not isinstance(kind, type) or missing:
        raise ConfigError(
            f"--logits-processors: {kind!r} is not a class of logits processors"
            + (f": it lacks {', '.join(missing)}" if missing else "")
        )
    return kind


def takes_prompt(function: RequestLogitsProcessor) -> bool:
    """Whether a function of one request takes the prompt first."""
    try:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        named = inspect.signature(function).parameters.values()
        return sum(one.kind in kinds and one.default is one.empty for one in named) >= 3
    except (TypeError, ValueError):
        return False
