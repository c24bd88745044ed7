"""Forms of products by other people's kernels, and by ours for few rows. admit.py decides which of them serve.

No library is needed: one that is installed is imported when its first form is made.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quire.devices.cuda.kernels import few
from quire.devices.cuda.launch import Launcher
from quire.devices.cuda.pack import CudaMatrix
from quire.lazy import Lazy, missing

if TYPE_CHECKING:
    humming: Any
    humming_ops: Any
    lt: Any
else:
    humming, humming_ops = Lazy("humming.layer"), Lazy("humming.ops")
    lt = Lazy("nvmath.bindings.cublasLt")

SINGLE, HALF = torch.float32, (torch.bfloat16, torch.float16)
CUDA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
SUMS_IN_SINGLE = 68  # the type of computation, as cuBLAS numbers it


@dataclass(frozen=True, slots=True)
class Form:
    """How one weight is multiplied: multiply(x [T, K], out), out [T, O] of one of `types`.

    With `parts` out is float32 [T, parts, O], to be added. x has at most `most` rows; 0: any.
    """

    multiply: Callable[[Any, Any], None]
    types: tuple[Any, ...]
    parts: int = 0
    most: int = 0


@dataclass(frozen=True, slots=True)
class Library:
    """What makes forms of weights for activations of a type: None if it has none. What it raises refuses it.

    A form holds `copied` bytes of a weight for itself.
    """

    name: str
    version: str
    form: Callable[[Launcher, CudaMatrix, Any], Form | None]
    copied: Callable[[CudaMatrix], int] = lambda weight: 0


def slices(run: Launcher, weight: CudaMatrix, act: Any) -> Form | None:
    """K in slices, for few rows by a wide weight."""
    parts = 1 if weight.packed is not None else few.slices(run, weight.values)
    multiply = partial(_by, partial(few.multiply_slices, run), weight.values)
    return Form(multiply, (SINGLE,), parts, 64) if parts > 1 else None


def vectors(run: Launcher, weight: CudaMatrix, act: Any) -> Form | None:
    """Row by row, without the matrix unit."""
    multiply = partial(_by, partial(few.multiply_vectors, run), weight.values)
    return Form(multiply, (SINGLE,), 1, 4) if weight.packed is None else None


def _by(multiply: Callable[[Any, Any, Any], None], weight: Any, x: Any, out: Any) -> None:
    multiply(x, weight, out)


def of_torch(whole: bool, run: Launcher, weight: CudaMatrix, act: Any) -> Form | None:
    """torch.mm: cuBLASLt on NVIDIA's GPUs. If `whole`, no product of torch in this process adds slices of K."""
    if weight.packed is not None:
        return None
    if whole:
        switches = torch.backends.cuda.matmul
        switches.allow_bf16_reduced_precision_reduction = (False, False)
        switches.allow_fp16_reduced_precision_reduction = (False, False)
    columns = weight.values.T

    def multiply(x: Any, out: Any) -> None:
        torch.mm(x, columns, out=out, **({} if out.dtype == x.dtype else {"out_dtype": out.dtype}))

    return Form(multiply, (weight.dtype, SINGLE))


def pinned(run: Launcher, weight: CudaMatrix, act: Any) -> Form | None:
    """cuBLASLt by nvmath-python: one algorithm for any number of rows, without slices of K and without a workspace."""
    values = weight.values
    if weight.packed is not None or values.dtype not in HALF:
        return None
    handle, product = lt.create(), lt.matmul_desc_create(SUMS_IN_SINGLE, CUDA_TYPES[SINGLE])
    (rows, columns), transposed, factors = values.shape, np.ones(1, np.int32), np.array([1, 0], np.float32)
    lt.matmul_desc_set_attribute(product, lt.MatmulDescAttribute.TRANSA, transposed.ctypes.data, 4)

    @cache
    def layout(dtype: Any, width: int, count: int) -> int:
        """`count` rows, which the library calls columns."""
        return int(lt.matrix_layout_create(CUDA_TYPES[dtype], width, count, width))

    own = layout(values.dtype, columns, rows)

    @cache
    def algorithm(dtype: Any) -> Any:
        """The first choice for 64 rows."""
        wanted, names = lt.matmul_preference_create(), lt.MatmulPreferenceAttribute
        none, found = np.zeros(1, np.uint64), np.zeros(1, lt.matmul_heuristic_result_dtype)
        for name, size in ((names.REDUCTION_SCHEME_MASK, 4), (names.MAX_WORKSPACE_BYTES, 8)):
            lt.matmul_preference_set_attribute(wanted, name, none.ctypes.data, size)
        layouts, count = [layout(values.dtype, columns, 64), layout(dtype, rows, 64)], np.zeros(1, np.int32)
        places = found.ctypes.data, count.ctypes.data
        lt.matmul_algo_get_heuristic(handle, product, own, *layouts, layouts[1], wanted, 1, *places)
        if not count[0]:
            raise RuntimeError("cuBLASLt has no algorithm without slices and workspace")
        return np.ascontiguousarray(found["algo"])

    def multiply(x: Any, out: Any) -> None:
        of_x, of_out = layout(x.dtype, columns, len(x)), layout(out.dtype, rows, len(x))
        place, one = out.data_ptr(), factors.ctypes.data
        lt.matmul(
            handle, product, one, values.data_ptr(), own, x.data_ptr(), of_x, one + 4, place,
            of_out, place, of_out, algorithm(out.dtype).ctypes.data, 0, 0, torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip

    return Form(multiply, (values.dtype, SINGLE))


def of_humming(run: Launcher, weight: CudaMatrix, act: Any) -> Form | None:
    """humming-kernels, batch-invariant, over a copy of the codes: 4 or 8 bits, by scales that `act` holds."""
    packed = weight.packed
    if packed is None or not copied_by_humming(weight) or act not in HALF:
        return None
    form, scales = packed.form, packed.scales.to(act)
    if not torch.equal(scales.float(), packed.scales):
        return None
    codes = packed.codes
    codes = torch.stack([codes & 15, codes >> 4], 2).flatten(1) if form.bits == 4 else codes
    codes = codes[:, : packed.columns].to(torch.int32).contiguous()
    codes += 128 * (form.bits == 8)
    about = {"dtype": f"uint{form.bits}", "group_size": form.group}
    layer = humming.HummingLayer(*weight.shape, weight_config=about, torch_dtype=act).to(codes.device)
    held = humming_ops.pack_weight(codes, form.bits)
    layer.load_from_tensors({"weight": held, "weight_scale": scales})
    layer.transform()
    mode = {"use_batch_invariant": True, "gemm_type": "dense"}
    return Form(lambda x, out: layer(x, outputs=out, compute_config=mode), (act,))


def copied_by_humming(weight: CudaMatrix) -> int:
    """The bytes of codes and scales, at most; 0 for a weight of which it has no form."""
    if weight.packed is None or weight.rounds or weight.inputs is not None:
        return 0
    form = weight.packed.form
    integers = form.number in (torch.uint8, torch.int8) and not (form.zeros or form.offsets or form.e2m1)
    return weight.nbytes if integers else 0


OURS = tuple(Library(form.__name__, "of Quire", form) for form in (slices, vectors))


def installed(exact: bool, every: bool) -> list[Library]:
    """Torch, and with `every` the libraries that are installed beside it."""
    others: tuple[tuple[str, str, Any], ...] = (
        ("nvmath", "nvmath-python", (pinned,)), ("humming", "humming-kernels", (of_humming, copied_by_humming)),
    )  # fmt: skip
    found = [Library("torch", torch.__version__, partial(of_torch, exact))]
    return found + [
        Library(name, importlib.metadata.version(name), *form)
        for module, name, form in others if every and not missing(module)
    ]  # fmt: skip
