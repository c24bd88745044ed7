"""Every kernel at the shapes of an 8B model, to be compiled on a machine that needs no GPU.

The launches of a case are those that a backend makes: the same functions, over tensors without values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from quire.devices.cuda.aot import RecordingLauncher
from quire.devices.cuda.jit import Compiled, compile_launch, measured
from quire.devices.cuda.kernels import (
    adapted,
    attention,
    elementwise,
    entries,
    experts,
    few,
    norm,
    packed,
    products,
    recurrent,
    relative,
    rope_store,
    routing,
    rows,
    sample,
    sparse,
)
from quire.devices.cuda.launch import Launcher
from quire.devices.cuda.peers import RankSums
from quire.devices.cuda.target import target_named
from quire.devices.cuda.tiles import attention_tiles
from quire.devices.cuda.work import WorkShape
from quire.devices.elementwise import XIELU, SparseGELU, Temperature
from quire.devices.operands import Routing
from quire.devices.sparse_ops import Choose, PositionScale
from quire.devices.stream_ops import StreamGates

FP8 = torch.float8_e4m3fn


def empty(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.empty(shape, dtype=dtype, device="meta")


def _linear(tokens: int, run: Launcher, dtype: Any = torch.bfloat16) -> None:
    x, weight = empty(tokens, 4096, dtype=dtype), empty(4096, 4096, dtype=dtype)
    products.linear(run, x, weight, x, residual=x)


def _few(run: Launcher) -> None:
    x, weight, real = empty(4, 4096), empty(4096, 4096), partial(empty, dtype=torch.float32)
    few.multiply_slices(run, x, weight, real(4, few.slices(run, weight), 4096))
    few.multiply_vectors(run, x, weight, real(4, 1, 4096))
    few.end(run, real(4, 8, 4096), x, real(4096), "silu", x)
    few.end(run, real(4, 1, 4096), empty(4, 2048), None, "silu", is_gated=True)


def _gated(tokens: int, run: Launcher) -> None:
    products.gated(run, empty(tokens, 4096), empty(28672, 4096), empty(tokens, 14336), "silu")


def _packed(tokens: int, form: packed.Form, integer: bool, run: Launcher) -> None:
    weight = packed.PackedWeight.outline(4096, 4096, form)
    x = empty(tokens, 4096, dtype=torch.int8 if integer else torch.bfloat16)
    x_scales = empty(tokens, dtype=torch.float32) if integer else None
    packed.linear(run, x, weight, empty(tokens, 4096), x_scales=x_scales)


def _attention(
    run: Launcher,
    many: bool = False,
    kept: Any = torch.bfloat16,
    width: int = 128,
    rotary: int = 0,
    listed: int = 0,
    every: int = 0,
) -> None:
    numbers, real = partial(empty, dtype=torch.int32), partial(empty, dtype=torch.float32)
    is_shared = rotary > 0 or every > 0
    heads, groups = (16, 1) if is_shared else (32, 8)
    tiles = attention_tiles(run.target.family, width, kept == torch.int8, is_shared)
    shape = WorkShape(heads, groups, tiles.many if many else tiles.few, listed=listed, every=every)
    side = empty(64, groups, 64, width + rotary, dtype=kept)
    scales = None if kept.itemsize > 1 else real(64, groups, 64) if kept == torch.int8 else real(groups)
    cache = attention.LayerCache(side, None if is_shared else side, scales, scales)
    states, split = (9, shape.head_tiles, shape.tile.rows), None if many else numbers(9, 8)
    step = attention.StepTensors(numbers(10), numbers(9), numbers(9), numbers(9, 1024))
    work = attention.WorkTensors(numbers(9, 8), split, numbers(9, 4), real(*states, width), real(*states, 2))
    q, out = empty(9, heads * (width + rotary)), empty(9, heads * width)
    further = attention.LayerCache(empty(64, 1, -(-64 // every), width), None) if every else None
    changes = attention.Changes(chosen=real(9, listed) if listed else None, entries=further)
    attention.attend(run, q, cache, out, step, work, shape, 0.1, changes=changes)


def _choice(run: Launcher) -> None:
    numbers, real, positions = (
        partial(empty, dtype=torch.int32),
        partial(empty, dtype=torch.float32),
        64 * 1024,
    )
    step = attention.StepTensors(numbers(10), numbers(9), numbers(9), numbers(9, positions // 64))
    op = Choose(None, 0, 64, 2048, scale=0.1)
    cache, q = attention.LayerCache(empty(64, 1, 64, 128), None), empty(9, 64 * 128)
    sparse.choose(run, q, real(9, 64), cache, numbers(9), step, op, 1, 64, real(9, 2048), empty)


def _entries(run: Launcher) -> None:
    numbers, real = partial(empty, dtype=torch.int32), partial(empty, dtype=torch.float32)
    step = attention.StepTensors(numbers(10), numbers(9), numbers(9), numbers(9, 1024))
    raw, kept = (attention.LayerCache(empty(64, 1, *shape), None) for shape in ((64, 2048), (16, 512)))
    by, places = norm.NormTensors("rms", real(512), None, 1e-6), empty(9, dtype=torch.int64)
    entries.store_entries(
        run, raw, kept, step, numbers(9), places, 4, 4, real(4, 1024), True, by, real(9, 64)
    )


def _experts(tokens: int, run: Launcher, form: packed.Form | None = None, rounds: bool = False) -> None:
    numbers, real = partial(empty, dtype=torch.int32), partial(empty, dtype=torch.float32)
    x, places = empty(tokens, 2048), empty(128, dtype=torch.int64)
    ids, weights = numbers(tokens, 8), real(tokens, 8)
    offsets = places if form is not None and form.offsets else None
    number = torch.bfloat16 if form is None else form.number
    values = places if form is not None and form.table else None
    held = experts.Weights(places, number, form, places, offsets=offsets, values=values, rounds=rounds)
    about = experts.Experts(held, held, numbers(128), 768, "silu", aligned=True)
    room = experts.expert_scratch(run, x, 8, about, 2048, empty)
    experts.run_experts(run, x, ids, weights, about, room, x)


def _adapters(run: Launcher) -> None:
    numbers, real = partial(empty, dtype=torch.int32), partial(empty, dtype=torch.float32)
    x, places, total = empty(256, 4096), empty(8, dtype=torch.int64), real(256, 28672)
    held = experts.Weights(places, x.dtype)
    changes = adapted.Changes(held, held, numbers(8), 64, real(8, 28672), real(8, 28672))
    rows, inner = adapted.sort_rows(run, numbers(256), 8, x.dtype, empty), empty(256, 64)
    adapted.shrink(run, x, changes, rows, inner)
    adapted.expand(run, inner, changes, rows, total)
    adapted.finish(run, total, total, rows.slots, changes, empty(256, 14336), None, "silu", None, 0.0, True)
    adapted.finish(run, total, total, rows.slots, changes, x, real(28672), None, x)


def _scan(kind: recurrent.Kind, run: Launcher) -> None:
    numbers, real = partial(empty, dtype=torch.int32), partial(empty, dtype=torch.float32)
    sizes = {
        "delta": (32, 128, 128),
        "space": (128, 128, 64),
        "selective": (1, 16, 8192),
        "gated": (1, 1, 4096),
    }
    heads, rows, columns = sizes[kind]
    by_head, by_row, wide = empty(9, heads), empty(9, 16 * rows), empty(9, heads * columns)
    parts = {
        "delta": [by_row, wide, by_head, by_head],
        "space": [wide, by_row, by_head],
        "selective": [wide, wide, by_row],
        "gated": [wide, wide, wide],
    }[kind]
    state = recurrent.State(real(8, heads * rows * columns), real(8, 4, sum(part.shape[1] for part in parts)))
    step = recurrent.StateStep(True, *(numbers(size) for size in (9, 9, 9, 9, 10, 10, 36, 9)))
    about = recurrent.Scan(kind, heads, rows, columns, 1 if heads == 1 else 2)
    recurrent.scan(run, about, parts, by_row, real(columns * rows), wide, state, step, real(columns))


def _convolution(run: Launcher) -> None:
    numbers, real = partial(empty, dtype=torch.int32), partial(empty, dtype=torch.float32)
    step = recurrent.StateStep(True, *(numbers(size) for size in (9, 9, 9, 9, 10, 10, 36, 9)))
    state = recurrent.State(real(8, 3, 8192), real(8, 4, 8192))
    recurrent.convolve(run, empty(9, 8192), real(8192, 4), empty(9, 8192), state, step, real(8192), "silu")
    ids = recurrent.State(real(8, 3, 1), real(8, 4, 1))
    places = empty(6, dtype=torch.int64), numbers(6), empty(4, dtype=torch.int64)
    recurrent.embed_ngrams(run, real(9, 1), *places, 2, torch.bfloat16, empty(9, 6 * 64), ids, step)


def _sample(run: Launcher) -> None:
    numbers, reals = empty(9, 4, dtype=torch.int64), empty(9, 4, dtype=torch.float64)
    logits, masks = empty(9, 128256, dtype=torch.float32), empty(9, 4008, dtype=torch.int32)
    sample.sample(run, logits, masks, numbers, reals, empty(9, dtype=torch.int32))


def _routes(run: Launcher) -> None:
    numbers, real = partial(empty, dtype=torch.int32), partial(empty, dtype=torch.float32)
    groups = Routing(256, 8, "sigmoid", num_groups=8, top_groups=4, group_sum=True, renormalize=True)
    for about in (Routing(128, 8, renormalize=True), groups):
        count = about.num_experts
        routing.route(run, empty(9, count), about, numbers(9, 8), real(9, 8), real(count))


def _rank_sums(run: Launcher) -> None:
    x, weight = empty(9, 8192, dtype=torch.float32), empty(8192, dtype=torch.float32)
    out, by, sums = empty(9, 8192), norm.NormTensors("rms", weight, None, 1e-5), RankSums(run, None, 8)
    sums.add(x, out)
    for parts in sums.ways(x):
        norm.normalize(run, x, out, by, 1, norm.Sum(out, (1.0, 1.0), out), parts=parts)


def _rows(run: Launcher) -> None:
    x, weight, numbers = empty(9, 4096), empty(4096, dtype=torch.float32), partial(empty, dtype=torch.int32)
    by = norm.NormTensors("rms", weight, None, 1e-5)
    norm.normalize(run, x, x, by)
    codes = empty(9, 4096, dtype=torch.int8), empty(9, dtype=torch.float32)
    norm.normalize(run, x, x, by, 1, norm.Sum(x, (1.0, 1.0), x, by), codes)
    norm.match_rms(run, empty(9, 4 * 4096), x, empty(9, 4 * 4096), 1e-6)
    rows.embed(run, empty(128256, 4096), numbers(9), x, 2.0)
    rows.arrange(run, x, empty(2, 4096, dtype=torch.float32), x)
    rows.arrange(run, x, empty(128, dtype=torch.int64), empty(72, 4096), numbers(9, 8), numbers(128))
    elementwise.add(run, x, x, x)
    elementwise.scale(run, x, x, 1.0, 30.0)
    elementwise.multiply(run, x, empty(9, 8), x)
    elementwise.apply(run, x, x, XIELU(0.8, 0.6, 0.5, -1e-6))
    elementwise.apply(run, x, x, Temperature(0.1, 8192), numbers(9))
    elementwise.apply(run, x, x, SparseGELU(1.6))
    elementwise.combine(run, empty(9, 4 * 4096), empty(9, 16), empty(9, 4 * 4096), 4)
    scales, gates = PositionScale(32, (0.1,) * 32, (1.0,) * 32), StreamGates(4, 20, 1e-6, 2.0, 0.0, (), ())
    elementwise.apply(run, x, x, scales, numbers(9), empty(64, dtype=torch.float32))
    elementwise.apply(run, empty(9, 24), empty(9, 24), gates, None, empty(48, dtype=torch.float32))
    elementwise.compare_parts(run, empty(9, 4 * 4096), empty(9, 4 * 4096), empty(9, 4), 0.1, 1e-6)
    span = empty(64, 16 * 512)
    relative.relative_scores(run, span, span, numbers(1023), numbers(3), span, 16, 0.1)


def _store(run: Launcher, kept: Any = torch.bfloat16) -> None:
    side, real = empty(64, 8, 64, 128, dtype=kept), partial(empty, dtype=torch.float32)
    scales = None if kept.itemsize > 1 else real(8) if kept != torch.int8 else real(64, 8, 64)
    cache, places = attention.LayerCache(side, side, scales, scales), empty(9, dtype=torch.int64)
    qk_norm = norm.NormTensors("rms", real(128), None, 1e-6)
    rope_store.angles(run, empty(9, dtype=torch.int32), real(64), 1.0, real(9, 128))
    rope_store.store_kv(
        run, empty(9, 48 * 128), empty(9, 32 * 128), cache, places, 32, real(9, 128), qk_norm, qk_norm
    )
    latent = attention.LayerCache(empty(64, 1, 64, 576), None)
    latent_norm = norm.NormTensors("rms", real(512), None, 1e-6)
    q = empty(9, 16 * 512), empty(9, 16 * 64), empty(9, 16 * 576)
    rope_store.store_latent(run, empty(9, 576), *q, latent, places, real(9, 64), latent_norm)


PACKED: dict[str, tuple[packed.Form, bool]] = {
    "int8 by int8": (packed.Form(torch.int8), True),
    "int8": (packed.Form(torch.int8), False),
    "int4 in groups of 64": (packed.Form(torch.uint8, 64), False),
    "int4 in groups of 128, by int8": (packed.Form(torch.uint8, 128), True),
    "MXFP4": (packed.Form(torch.uint8, 32, e2m1=True), False),
    "NVFP4": (packed.Form(torch.uint8, 16, e2m1=True), False),
    "Q4_K": (packed.Form(torch.uint8, 32, offsets=True), False),
    "NF4": (packed.Form(torch.uint8, 64, table=True), False),
    "LUT4": (packed.Form(torch.uint8, table=True), False),
    "IQ2_S": (packed.Form(torch.uint8, 16, table=True), False),
    "Q6_K": (packed.Form(torch.int8, 16), False),
    "FP8 weights in groups of 128": (packed.Form(FP8, 128), False),
}
"""PACKED are forms of weights, and whether activations are int8."""
CASES: dict[str, Callable[[Launcher], None]] = {
    **{f"linear, {tokens} tokens": partial(_linear, tokens) for tokens in (1, 64, 4096)},
    **{f"gated, {tokens} tokens": partial(_gated, tokens) for tokens in (1, 64, 4096)},
    **{
        f"{name}, {tokens} tokens": partial(_packed, tokens, *about)
        for name, about in PACKED.items()
        for tokens in (1, 4096)
    },
    "forms for few rows, and ends": _few,
    "linear of float32, 1 token": partial(_linear, 1, dtype=torch.float32),
    "linear of float32, 4096 tokens": partial(_linear, 4096, dtype=torch.float32),
    "experts, 1 token": partial(_experts, 1),
    "experts, 8192 tokens": partial(_experts, 8192),
    **{
        f"experts, {name}, {tokens} tokens": partial(_experts, tokens, form=form, rounds=rounds)
        for name, (form, rounds) in PACKED.items()
        for tokens in (1, 8192)
    },
    "adapters": _adapters,
    "convolution": _convolution,
    "delta rule": partial(_scan, "delta"),
    "scan of Mamba-2": partial(_scan, "space"),
    "scan of Mamba-1": partial(_scan, "selective"),
    "gated recurrence": partial(_scan, "gated"),
    "sums over ranks": _rank_sums,
    "sampling": _sample,
    "routing": _routes,
    "rows": _rows,
    "rope and store": _store,
    "rope and store in int8": partial(_store, kept=torch.int8),
    "rope and store in FP8": partial(_store, kept=FP8),
    "attention, few queries": _attention,
    "attention, many queries": partial(_attention, many=True),
    "attention over FP8, few queries": partial(_attention, kept=FP8),
    "attention over int8, few queries": partial(_attention, kept=torch.int8),
    "latent attention": partial(_attention, width=512, rotary=64),
    "latent attention over chosen keys": partial(_attention, width=512, rotary=64, listed=2048),
    "attention over chosen keys": partial(_attention, listed=2048),
    "latent attention over keys and entries": partial(_attention, width=512, every=128),
    "latent attention over keys and chosen entries": partial(_attention, width=512, every=4, listed=512),
    "entries": _entries,
    "choice of keys": _choice,
    "latent attention over FP8": partial(_attention, kept=FP8, width=512, rotary=64),
    "attention of 256, few queries": partial(_attention, width=256),
}


def compile_case(case: str, target: str) -> list[Compiled]:
    """Compile what a case launches on a target; nothing if the target lacks its types."""
    run = RecordingLauncher(target_named(target))
    if "FP8" in case and not run.target.e4m3:
        return []
    CASES[case](run)
    return [measured(compile_launch(launch, run.target)) for launch in run.launches.values()]
