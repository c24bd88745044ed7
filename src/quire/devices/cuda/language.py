"""Triton as kernels name it. Without it, functions that launch compiled kernels still work: they read names alone."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from quire.lazy import missing


class Kernel:
    """A kernel's name, and the names of its arguments."""

    def __init__(self, fn: Any, do_not_specialize: tuple[str, ...] = ()) -> None:
        self.fn, self.do_not_specialize = fn, do_not_specialize
        self.arg_names = fn.__code__.co_varnames[: fn.__code__.co_argcount]


class Names:
    """Types and constants of Triton's language, as it prints them."""

    float64, float32, float16, bfloat16 = "fp64", "fp32", "fp16", "bf16"
    float8e4nv, float8e5, int64, int32, int8, uint8 = "fp8e4nv", "fp8e5", "int64", "int32", "int8", "uint8"

    @staticmethod
    def constexpr(value: Any) -> Any:
        return value


class Functions:
    """Functions of Triton that run on the host."""

    @staticmethod
    def jit(fn: Any = None, do_not_specialize: tuple[str, ...] = ()) -> Any:
        return Kernel(fn) if fn else lambda fn: Kernel(fn, do_not_specialize)

    @staticmethod
    def cdiv(x: int, y: int) -> int:
        return -(-x // y)

    @staticmethod
    def next_power_of_2(n: int) -> int:
        return 1 << max(n - 1, 0).bit_length()


if TYPE_CHECKING:
    import triton as triton
    from triton import language

    tl = language
elif missing("triton"):
    triton, tl = Functions, Names
else:
    triton, tl = importlib.import_module("triton"), importlib.import_module("triton.language")
