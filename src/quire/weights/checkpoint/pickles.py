"""A reader of the pickles in PyTorch checkpoints that builds plain values and tensors, and runs nothing.

It knows the few opcodes that state dicts use and refuses all others. Python's own unpickler is not used: a dictionary
key of nested tuples makes it hash without end. Here keys are strings, and the number of operations is bounded.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from quire.errors import ModelError

MAX_OPERATIONS = 1_000_000  # a state dict takes 30 for each tensor
STORAGES: dict[str, np.dtype[Any]] = {
    "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "DoubleStorage": np.dtype("<f8"),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
    "ShortStorage": np.dtype("<i2"),
    "CharStorage": np.dtype("i1"),
    "ByteStorage": np.dtype("u1"),
    "BoolStorage": np.dtype("?"),
}


class Storage(NamedTuple):
    """A run of `size` elements kept in the archive under data/`key`."""

    dtype: str
    key: str
    size: int


class Tensor(NamedTuple):
    """A strided view of a storage; offset and strides in elements. The fields are unchecked and may be anything."""

    storage: Any
    offset: Any
    shape: Any
    strides: Any


class Global(NamedTuple):
    """A name that a state dict may mention. Nothing is imported for it."""

    module: str
    name: str


REBUILD_TENSOR = Global("torch._utils", "_rebuild_tensor_v2")
REBUILD_PARAMETER = Global("torch._utils", "_rebuild_parameter")
ORDERED_DICT = Global("collections", "OrderedDict")
GLOBALS = frozenset(
    {REBUILD_TENSOR, REBUILD_PARAMETER, ORDERED_DICT, *(Global("torch", s) for s in STORAGES)}
)

IGNORED = frozenset({"PROTO", "FRAME"})
PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})
_VALUES = """INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE
    BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES"""
VALUES = frozenset(_VALUES.split())  # pushed as they stand in the pickle
CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


def is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def read_pickle(data: bytes | BytesIO, most: int = MAX_OPERATIONS) -> Any:
    """Build the value of the pickle: dictionaries, lists, tuples, numbers, text, `Storage` and `Tensor`.

    Raises ModelError for a pickle that needs more, and anything else where it is corrupt.
    """
    machine = _Machine()
    for name, argument in _operations(data, most):
        if name == "STOP":
            break
        machine.step(name, argument)
    return machine.pop()


def _operations(data: bytes | BytesIO, most: int) -> Iterator[tuple[str, Any]]:
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if count == most:
            raise ModelError(f"the pickle has more than {most} operations; it may be hostile")
        yield opcode.name, argument


class _Machine:
    """The stack of a pickle, its marks and its memo."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []  # places in the stack
        self._memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        if name in VALUES:
            self._stack.append(argument)
        elif name in PUTS or name == "MEMOIZE":
            self._memo[len(self._memo) if name == "MEMOIZE" else int(argument)] = self._top()
        elif name in GETS:
            self._stack.append(self._memo[int(argument)])
        elif name in CONSTANTS:
            self._stack.append(CONSTANTS[name])
        elif name in STEPS:
            STEPS[name](self, argument)
        elif name not in IGNORED:
            raise ModelError(f"the pickle uses {name}, which no checkpoint needs; it may be hostile")

    def pop(self) -> Any:
        if self._marks and self._marks[-1] == len(self._stack):
            raise ModelError("the pickle takes a value that is not there; it is corrupt")
        return self._stack.pop()

    def _top(self) -> Any:
        value = self.pop()
        self._stack.append(value)
        return value

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def items(self) -> list[Any]:
        """Take all above the last mark, which goes with them."""
        begin = self._marks.pop()
        items = self._stack[begin:]
        del self._stack[begin:]
        return items

    def last(self, count: int) -> list[Any]:
        """Take the last values, in the order in which they came."""
        return [self.pop() for _ in range(count)][::-1]

    def extend(self, items: list[Any]) -> None:
        if not isinstance(self._top(), list):
            raise ModelError("the pickle appends to what is no list; it may be hostile")
        self._top().extend(items)

    def make_dict(self) -> None:
        items = self.items()
        self.push({})
        self.set(items)

    def set(self, items: list[Any]) -> None:
        target = self._top()
        if not isinstance(target, dict) or len(items) % 2:
            raise ModelError("the pickle sets items of what is no dictionary; it may be hostile")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str):
                raise ModelError(f"the pickle has a {type(key).__name__} as a key, state dicts have text")
            target[key] = value

    def name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str) or Global(module, name) not in GLOBALS:
            raise ModelError(
                f"the pickle asks for {str(module)[:80]}.{str(name)[:80]}, which no checkpoint needs; refused, "
                "it may be hostile"
            )
        self.push(Global(module, name))

    def call(self, function: Any, arguments: Any) -> None:
        if not isinstance(function, Global) or not isinstance(arguments, tuple):
            raise ModelError("the pickle calls what is no function; it may be hostile")
        if function == ORDERED_DICT and not arguments:
            self._stack.append({})
        elif function == REBUILD_TENSOR and len(arguments) >= 4:
            self._stack.append(Tensor(*arguments[:4]))
        elif function == REBUILD_PARAMETER and arguments:
            self._stack.append(arguments[0])
        else:
            raise ModelError(f"the pickle calls {function.name} as no checkpoint does; it may be hostile")

    def set_attributes(self, _: Any) -> None:
        """Drop a state dict's own attributes (_metadata), which say nothing of its tensors."""
        if not isinstance(self._top(), dict):
            raise ModelError("the pickle sets attributes of what is no dictionary; it may be hostile")

    def find_storage(self, found: Any) -> None:
        match found:
            case ["storage", Global("torch", dtype), str(key), _, count, *view] if (
                dtype in STORAGES and is_size(count) and view in ([], [None])
            ):
                self._stack.append(Storage(dtype, key, count))
            case _:
                raise ModelError("a persistent id in the pickle is not a storage of known type, key and size")


STEPS: dict[str, Callable[[_Machine, Any], object]] = {
    "MARK": lambda machine, _: machine.mark(),
    "POP": lambda machine, _: machine.pop(),
    "POP_MARK": lambda machine, _: machine.items(),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "LIST": lambda machine, _: machine.push(machine.items()),
    "APPEND": lambda machine, _: machine.extend(machine.last(1)),
    "APPENDS": lambda machine, _: machine.extend(machine.items()),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.items())),
    "TUPLE1": lambda machine, _: machine.push(tuple(machine.last(1))),
    "TUPLE2": lambda machine, _: machine.push(tuple(machine.last(2))),
    "TUPLE3": lambda machine, _: machine.push(tuple(machine.last(3))),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "DICT": lambda machine, _: machine.make_dict(),
    "SETITEM": lambda machine, _: machine.set(machine.last(2)),
    "SETITEMS": lambda machine, _: machine.set(machine.items()),
    "GLOBAL": lambda machine, named: machine.name(*str(named).partition(" ")[::2]),
    "STACK_GLOBAL": lambda machine, _: machine.name(*machine.last(2)),
    "REDUCE": lambda machine, _: machine.call(*machine.last(2)),
    "BUILD": lambda machine, _: machine.set_attributes(machine.pop()),
    "BINPERSID": lambda machine, _: machine.find_storage(machine.pop()),
}
