"""Runs Triton kernels on CPU tensors, program by program, with the results that a GPU's types give.

Triton's own interpreter (3.9) asks for an environment variable before its import, multiplies in numpy's float32, whose
sums depend on the other rows of a tile, and computes with the bits of bfloat16 and FP8. Here products are summed in
float64 and rounded once, conversions round to the nearest even number, and arithmetic on types of less than 16 exact
bits is an error: kernels convert them to float32 first.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import TensorHandle
from triton.runtime.jit import JITFunction

FLOATS = {
    tl.bfloat16: np.dtype(ml_dtypes.bfloat16),
    tl.float8e4nv: np.dtype(ml_dtypes.float8_e4m3fn),
    tl.float8e5: np.dtype(ml_dtypes.float8_e5m2),
    tl.float16: np.dtype(np.float16),
    tl.float32: np.dtype(np.float32),
    tl.float64: np.dtype(np.float64),
}
# Triton's interpreter holds these as unsigned integers of their bits.
HELD_AS_BITS = {tl.bfloat16: np.uint16, tl.float8e4nv: np.uint8, tl.float8e5: np.uint8}
ONE_THREAD = 1 << 18


def _values(handle: Any) -> Any:
    kind = handle.dtype.scalar
    return handle.data.view(FLOATS[kind]) if kind in HELD_AS_BITS else handle.data


def _rounded(values: Any, kind: Any) -> Any:
    out = values.astype(FLOATS[kind])
    return out.view(HELD_AS_BITS[kind]) if kind in HELD_AS_BITS else out


def _product(a: Any, b: Any) -> Any:
    """a @ b in pieces that BLAS gives to one thread: several would wait for each other on a busy machine."""
    size = max(1, ONE_THREAD // b.size)
    return np.concatenate([a[start : start + size] @ b for start in range(0, len(a), size)])


class ExactBuilder(triton_interpreter.InterpreterBuilder):  # type: ignore[misc]
    """Triton's operations over numpy arrays, with the conversions and products of this module."""

    def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        if not a.dtype.is_floating():
            total = np.matmul(a.data.astype(np.int64), b.data.astype(np.int64)) + d.data
            return TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)
        total = _product(_values(a).astype(np.float64), _values(b).astype(np.float64)) + d.data
        return TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        source, wanted = src.dtype.scalar, dst_type.scalar
        if source in FLOATS and wanted in FLOATS:
            values = _values(src)
            wide = values.astype(np.float32) if source in HELD_AS_BITS else values
            return TensorHandle(_rounded(wide, wanted), wanted)
        if source in HELD_AS_BITS:
            data = _values(src).astype(np.float32)
            return TensorHandle(data.astype(triton_interpreter._get_np_dtype(wanted)), wanted)
        if wanted in HELD_AS_BITS:
            return TensorHandle(_rounded(src.data.astype(np.float32), wanted), wanted)
        return super().cast_impl(src, dst_type)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        return self.cast_impl(src, dst_type)

    create_si_to_fp = create_ui_to_fp = create_fp_to_si = create_fp_to_ui = cast_impl
    create_fp_ext = create_fp_trunc = cast_impl

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar in HELD_AS_BITS:
            raise TypeError(f"{op.__name__} of {lhs.dtype.scalar} tensors: convert them to float32 first")
        result = super().binary_op(lhs, rhs, op)
        if result.data.dtype == np.bool_:  # a comparison: its type is not that of its operands
            result.dtype = tl.int1
        return result


@functools.cache
def _rewritten(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel's Python function, with assignments that make tensors of plain numbers."""
    rewritten: Callable[..., Any] = triton_interpreter.FunctionRewriter(function).rewrite_ast()
    return rewritten


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a compiled function within an interpreted one."""
    return _rewritten(function.fn)(*args, **kwargs)


@contextmanager
def _interpreting(builder: ExactBuilder) -> Iterator[None]:
    """Let Triton's language compute with `builder` for a while, and its compiled functions be called."""
    scope = triton_interpreter._LangPatchScope()
    try:
        scope.set_attr(triton_interpreter, "interpreter_builder", builder)
        scope.set_attr(triton_interpreter, "interpreter_semantic", TritonSemantic(builder))
        scope.set_attr(JITFunction, "__call__", _call)
        for module in (tl, tl.core):
            triton_interpreter._patch_builtin(module, builder, scope)
            triton_interpreter._patch_lang_core(module, scope)
        triton_interpreter._patch_builtin(tl.math, builder, scope)
        triton_interpreter._patch_builtin(tl.tensor, builder, scope)
        triton_interpreter._patch_lang_tensor(tl.tensor, scope)
        yield
    finally:
        scope.restore()


def interpret(
    kernel: Any, grid: tuple[int, int, int], args: dict[str, Any], constants: dict[str, Any]
) -> None:
    """Run every program of a grid, one after another. Tensors lie in the memory of the host."""
    builder = ExactBuilder()
    with _interpreting(builder), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # rows of padding may be NaN throughout
        function = _rewritten(kernel.fn)
        given = {name: triton_interpreter._implicit_cvt(value) for name, value in args.items()}
        builder.set_grid_dim(*grid)
        for place in np.ndindex(grid):
            builder.set_grid_idx(*place)
            function(**given, **constants)
