"""Splits stacked experts that a quantization packed: the fields of each expert's matrices become tensors.

A stack is a parameter `experts.gate_up_proj` with fields such as `experts.gate_up_proj_scale_inv`, or a module
`input_linear` with fields such as `input_linear.weight_scale`. Its shape tells whether outputs are rows or columns.
Floats are split too if the family has a tensor for each expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from quire.errors import ModelError
from quire.model.families.names import LLAMA_NAMES, TensorNames
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.mixture import MixtureConfig
from quire.model.split_matrices import ApartCheckpoint, TensorPart
from quire.weights.checkpoint import Checkpoint
from quire.weights.tensor import Array

CODES = ("weight", "weight_packed")
OTHERS = ("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "weight_zero_point",
          "weight_shape", "input_scale", "input_global_scale", "activation_scale")  # fmt: skip
# ENDINGS of parameters stand for fields, beside "_" and the field.
ENDINGS = {
    "": "weight",
    "_packed": "weight_packed",
    "_scale": "weight_scale",
    "_scale_inv": "weight_scale_inv",
    "_bias": "bias",
}


@dataclass(frozen=True, slots=True)
class Stack:
    """The matrices [out, width] of `count` experts in one tensor, each of them of the `modules` one after the other.

    With `halves` the rows of the first module come first, else rows alternate. `fields` are tensors by field.
    """

    name: str
    modules: tuple[str, ...]
    count: int
    out: int
    width: int
    halves: bool
    fields: dict[str, str]

    def columns(self, checkpoint: Checkpoint) -> bool | None:
        """Whether outputs are columns; None if the shape does not tell. Raises ModelError for another shape."""
        name = next(self.fields[field] for field in CODES if field in self.fields)
        shape = checkpoint.shape(name)
        if len(shape) != 3 or shape[0] != self.count or self.out not in shape[1:]:
            wanted = [self.count, self.out, self.width]
            raise ModelError(
                f"{checkpoint.path(name)}: tensor {name} must hold experts {wanted}, got {list(shape)}"
            )
        return None if shape[1] == shape[2] else shape[2] == self.out


def stacks_apart(spec: DecoderConfig, names: TensorNames, stored: Checkpoint) -> Checkpoint:
    """Take packed stacks apart; all other tensors stay as the checkpoint stores them. Raises ModelError.

    A stack with a field of another name keeps it, and is refused for it when its tensors are compared with the model's.
    """
    present = frozenset(stored.names())
    names = names.fitted(present)
    pieces: dict[str, TensorPart] = {}
    for i, layer in enumerate(spec.layers):
        if layer.mixture is not None:
            own = names.of_sublayer(i % names.sublayers)
            pieces |= _of_layer(layer.mixture, own, own.layer.format(i=i // names.sublayers), stored, present)
    return ApartCheckpoint(stored, pieces) if pieces else stored


def experts_apart(names: TensorNames) -> TensorNames:
    """Adapt the names of a family that stacks its experts to split ones."""
    layer = names.layer.format(i=0)
    return names.fitted(
        [
            f"{layer}{names['mixture.experts']}0.",
            f"{layer}{names['mixture.shared']}{names['mixture.shared.gate_up']}.weight",
        ]
    )


def _of_layer(
    mixture: MixtureConfig, names: TensorNames, layer: str, stored: Checkpoint, present: frozenset[str]
) -> dict[str, TensorPart]:
    stacks = [stack for stack in _stacks(mixture, names, layer, present) if stack.fields.keys() & set(CODES)]
    packed = any(stack.fields.keys() & set(OTHERS) for stack in stacks)
    if not stacks or (names.expert_stack and not packed):
        return {}
    told = {stack.columns(stored) for stack in stacks} - {None}
    if len(told) > 1:
        raise ModelError(
            f"{layer}: of the stacked experts, some have outputs as rows and others have them as columns"
        )
    columns = told.pop() if told else names.expert_stack == "columns"
    pieces: dict[str, TensorPart] = {}
    for stack in stacks:
        for field, name in stack.fields.items():
            for e in range(stack.count):
                for place, module in enumerate(stack.modules):
                    take = partial(_taken, stack, stored, field, e, place, bool(columns))
                    outline = np.broadcast_to(np.zeros((), stored.dtype(name)), stored.shape(name))
                    pieces[f"{layer}{module.format(e=e)}.{field}"] = TensorPart(
                        name, take, take(outline).shape
                    )
    return pieces


def _stacks(
    mixture: MixtureConfig, names: TensorNames, layer: str, present: frozenset[str]
) -> Iterator[Stack]:
    """Yield the stacks that a layer may have, with the fields that are present."""
    count = mixture.routing.num_experts - mixture.zero_experts
    inner, d = mixture.intermediate_size, mixture.hidden_size
    if names.expert_stack:
        whole, up, down = (
            layer + names["mixture.experts"],
            names["mixture.expert.up"],
            names["mixture.expert.down"],
        )
        own, halves = LLAMA_NAMES, names.expert_halves
        prefix = f"{names['mixture.experts']}{{e}}."
    else:
        whole, up, down = layer + names["mixture.experts"].partition("{e}")[0], "gate_up_proj", "down_proj"
        own, halves, prefix = names, True, names["mixture.experts"]
    gate_name, up_name, down_name = (
        prefix + module
        for module in (own["mixture.expert.gate"], own["mixture.expert.up"], own["mixture.expert.down"])
    )
    found: list[tuple[str, tuple[str, ...], int, int]]
    if names["mixture.expert.gate_apart"]:
        found = [(names["mixture.expert.gate_apart"], (gate_name,), inner, d), (up, (up_name,), inner, d)]
    else:
        found = [(up, (gate_name, up_name), 2 * inner, d)]
    for name, modules, out, width in (*found, (down, (down_name,), d, inner)):
        yield Stack(whole + name, modules, count, out, width, halves, _fields(whole + name, present))


def _fields(name: str, present: frozenset[str]) -> dict[str, str]:
    module = name.removesuffix(".weight")
    named = {f"{module}{ending}": field for ending, field in ENDINGS.items()}
    named |= {f"{module}{mark}{field}": field for field in (*CODES, *OTHERS) for mark in "._"}
    return {field: tensor for tensor, field in named.items() if tensor in present}


def _taken(
    stack: Stack, stored: Checkpoint, field: str, expert: int, place: int, columns: bool, array: Array
) -> Array:
    """Slice one expert's share, the `place`-th of its stack, out of a quantization field. Raises ModelError."""
    size = stack.out // len(stack.modules)
    if field == "weight_shape":
        return np.array([size, stack.width], np.int64)
    if array.size == 1:
        whole: Array = array.reshape(1)
        return whole
    if len(array) not in (1, stack.count):
        raise _wrong(stack, stored, field, array)
    one: Array = array[expert if len(array) == stack.count else 0]
    one = one.T if columns and one.ndim == 2 else one
    if one.size == 1:
        one = one.reshape(1)
        return one
    rows, parts = len(one), len(stack.modules)
    if parts == 1 or rows == 1:
        return one
    block = stack.out // rows  # outputs that share a scale, or lie in one word
    if rows == parts:
        one = one[place : place + 1]
    elif rows == stack.out and not stack.halves:
        one = one[place::parts]
    elif stack.halves and rows * block == stack.out and size % block == 0:
        one = one[place * (rows // parts) : (place + 1) * (rows // parts)]
    else:
        raise _wrong(stack, stored, field, array)
    return one


def _wrong(stack: Stack, stored: Checkpoint, field: str, array: Array) -> ModelError:
    name = stack.fields[field]
    return ModelError(
        f"{stored.path(name)}: tensor {name} {list(array.shape)} does not divide among {stack.count} experts of "
        f"{stack.out} outputs; use another version of the model"
    )
