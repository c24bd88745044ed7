"""Stages over kernels alone: what the machine is, its ceilings, bits and accuracy, and each kernel's share."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import metadata
from itertools import islice, product
from typing import Any

import numpy as np
import torch

from bench.visit.cases import CACHES, FP8, PACKED, Paged, Weight, row_cases
from bench.visit.place import Place, distance, same
from quire import SamplingParams
from quire.devices.cuda import admit
from quire.devices.cuda.kernels import norm, sample
from quire.devices.cuda.language import tl, triton
from quire.devices.cuda.launch import Launch
from quire.devices.cuda.libraries import installed
from quire.devices.cuda.pack import CudaMatrix
from quire.devices.cuda.tiles import AttentionTile, Shape, attention_tiles
from quire.devices.host import HostLogits
from quire.devices.reference.sampler import gumbel
from quire.devices.registry import make_backend
from quire.devices.sampling import SlotSampling
from quire.devices.torch.run import TorchLogits

ASKED = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,temperature.gpu,power.limit"
# Of Llama-3.1-8B: outputs, columns, and whether rows of a gate and of an up projection alternate.
SHAPES = {
    "qkv": (6144, 4096, False),
    "out": (4096, 4096, False),
    "gate and up": (14336, 4096, True),
    "down": (4096, 14336, False),
    "head": (128256, 4096, False),
}
HEADS = 32, 8, 128
TOKENS = 1, 8, 16, 64, 256, 2048, 8192
STREAMED = 256 << 20  # bytes of weights that a measurement goes through: more than caches hold
INT4 = "int4 in groups of 64"
EVERY = 1 << 20  # processors: attention is split as far as it can be


def environment(place: Place) -> None:
    """Versions, driver and clocks."""
    versions = {name: metadata.version(name) for name in ("torch", "triton", "numpy")}
    place.row("versions", python=platform.python_version(), cuda=torch.version.cuda, **versions)
    if place.small:
        place.row("no GPU: kernels are interpreted, with the tiles of sm_90")
        return
    about = torch.cuda.get_device_properties(0)
    place.row("target", name=place.run.target.name, processors=about.multi_processor_count)
    command = ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader"]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    place.row("nvidia-smi", **dict(zip(ASKED.split(","), told.split(", "), strict=False)))


def ceilings(place: Place) -> None:
    """The most that this card copies and multiplies, by torch on random data."""
    size, side = (1 << 10, 64) if place.small else (1 << 29, 8192)
    source, copied = place.draw(size, dtype=torch.int32), place.empty(size, dtype=torch.int32)
    place.rate("copy", lambda i: copied.copy_(source), 2 * source.nbytes)
    a, b = place.draw(side, side), place.draw(side, side, seed=1).T
    codes, one = place.draw(side, side, dtype=torch.int8), torch.ones((), device=place.tensors)
    x, y, out = a.to(FP8), b.T.to(FP8).T, place.empty(side, side)
    for name, work in {
        "bf16 product": lambda i: torch.matmul(a, b, out=out),
        "int8 product": lambda i: torch._int_mm(codes, codes.T),
        "fp8 product": lambda i: torch._scaled_mm(x, y, one, one, out_dtype=torch.bfloat16),
    }.items():
        place.rate(name, work, 0, 2 * side**3, name.split()[0])


def bits(place: Place) -> None:
    """Rows of each kernel in steps of many sizes, attention in all its forms, the sampler; and values by float64."""
    kinds = [*(("bfloat16", "FP8 e4m3") if place.small else CACHES), "latent"]
    checks: list[tuple[str, Callable[..., None], tuple[Any, ...]]] = [
        ("noise", noise_bits, ()),
        ("sampler", sampler_bits, ()),
    ]
    checks += [(f"attention, {kind} cache", attention_bits, (kind,)) for kind in kinds]
    checks += [(f"16 rows, {kind} cache", few_rows_bits, (kind,)) for kind in kinds if kind in CACHES]
    checks += [(f"{make.func.__name__} {make.args[1:]}", row_bits, (make,)) for make in row_cases(place)]
    shapes = [(40, 272)] if place.small else [(4096, 4096), (4096, 14336)]
    checks += [("libraries", library_bits, (kind, *shape)) for shape in shapes for kind in ("bfloat16", INT4)]
    for name, check, args in islice(checks, place.share[0], None, place.share[1]):
        place.attempt(name, check, place, *args)


def row_bits(place: Place, make: Callable[[], Any]) -> None:
    """Rows of steps of many sizes beside the same rows of one step, and the first ones beside float64."""
    case = make()
    every, differs = case.compute(slice(0, case.rows)), list[int]()
    for size in (1, 17, 65) if place.small else (1, 8, 16, 17, 64, 65, 512, 2048):
        first = (case.rows - size) // 2
        picked = slice(first, first + size)
        if size <= case.rows and not same(case.compute(picked), every[picked]):
            differs.append(size)
    some = slice(0, 5 if place.small else 64)
    error = distance(every[some], case.exact(some))
    place.row(case.name, not differs and error <= case.close, differs_at=differs, error=error)


def library_bits(place: Place, kind: str, outputs: int, columns: int) -> None:
    """What admission says of each library that is installed: none of it is an error."""
    weight, sizes = Weight(place, kind, outputs, columns), [1, 17, 65] if place.small else admit.SIZES
    if (held := weight.packed) is not None:  # scales that humming takes
        held = replace(held, scales=held.scales.bfloat16().float())
    matrix = CudaMatrix(None if held is not None else weight.codes, packed=held)
    product_of, about = (
        admit.Product(place.run, matrix, None, None, 0.0, False),
        (weight.act, weight.act, False),
    )
    names = {library.name: library for library in installed(True, True)}
    for name, found in admit.judge(product_of, names, about, sizes, True, True).items():
        row = f"library {name}, {kind}, {outputs} x {columns}"
        place.row(row, accurate=found.accurate, our_bits=found.exact, serves=str(found.sizes))


def attention_bits(place: Place, kind: str) -> None:
    """Prompts beside decoding, whole beside split, alone beside together, and last positions beside float64."""
    lengths, last = ([290, 40], 3) if place.small else ([3000, 700, 65, 1], 100)
    shape: tuple[int, ...] = (4, 2, 32) if place.small else HEADS
    if kind == "latent":
        shape = (4, 1, 32, 16) if place.small else (16, 1, 512, 64)
    paged = Paged(place, lengths, CACHES.get(kind, torch.bfloat16), *shape, last=last)
    wanted, parts = paged.solve(paged.parts, many=True), paged.parts
    tokens = [(i, p, p + 1) for i, first, stop in parts for p in range(first, stop)]
    found = {
        "few rows of a tile": paged.solve(parts),
        "split": paged.solve(parts, processors=EVERY),
        "split, many rows": paged.solve(parts, many=True, processors=8),
        "alone": torch.cat([paged.solve([part], many=True) for part in parts]),
        "decoding": torch.cat([paged.solve([token], processors=EVERY) for token in tokens]),
    }
    differs = [form for form, out in found.items() if not same(out, wanted)]
    ends = np.cumsum([stop - first for _, first, stop in parts]) - 1
    error = distance(wanted[ends], torch.stack([paged.exact(i) for i in range(len(lengths))]))
    place.row(f"attention, {kind} cache", not differs and error <= 1e-2, differs=differs, error=error)


def few_rows_bits(place: Place, kind: str) -> None:
    """Tell whether tiles of 16 rows, which new GPUs multiply by another instruction, have the bits of larger ones."""
    shape = (4, 2, 32) if place.small else HEADS
    paged = Paged(place, [290, 40] if place.small else [3000, 700, 65, 1], CACHES[kind], *shape)
    tiles = attention_tiles(place.run.target.family, shape[2], CACHES[kind] == torch.int8)
    small = AttentionTile(16, tiles.few.keys, Shape(4, 3))
    equal = same(paged.solve(paged.parts, tile=small), paged.solve(paged.parts, tile=tiles.many))
    place.row(f"16 rows of queries, {kind} cache", equal=equal)


@triton.jit
def noise(seeds, positions, out, SIZE: tl.constexpr):
    row, token = tl.program_id(0), tl.arange(0, SIZE)[None, :]
    made = sample.gumbel(tl.load(seeds + row), tl.load(positions + row), token)
    tl.store(out + row * SIZE + token, made)


def noise_bits(place: Place) -> None:
    """The noise of sampling beside its definition, bit for bit."""
    seeds, positions = [0, 1, 2**63 - 5, -(2**63)], [0, 7, 131_072, 2**31 - 1]
    out, size = place.empty(4, 1024, dtype=torch.float64), 1024
    given = place.numbers(seeds, torch.int64), place.numbers(positions), out
    place.run(
        Launch(noise, (4, 1, 1), dict(zip(("seeds", "positions", "out"), given, strict=True)), {"SIZE": size})
    )
    wanted = [gumbel(seed % 2**64, at, np.arange(size)) for seed, at in zip(seeds, positions, strict=True)]
    differ = int((out.cpu().numpy().view(np.int64) != np.stack(wanted).view(np.int64)).sum())
    place.row(f"noise of {out.numel()} tokens", not differ, differ=differ)


def sampler_bits(place: Place) -> None:
    """Tokens drawn from the same logits by the device and by the CPU."""
    rows, vocab = (60, 40) if place.small else (4096, 32_000)
    logits, drawn = place.draw(rows, vocab, dtype=torch.float32) * 3, list[Any]()
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
        for t, k, p, m in product((0.0, 0.3, 1.0, 2.0), (0, 1, 40), (1.0, 0.9), (0.0, 0.05))
    ]
    for device, held in ((place.device, TorchLogits(logits)), ("cpu", HostLogits(logits.cpu().numpy()))):
        sampler = make_backend(device=device).sampler(vocab)
        for slot in range(rows):
            sampler.set(slot, SlotSampling(slot * 977, params[slot % len(params)], [1] * (slot % 7)))
        drawn.append(sampler.sample(held, [*range(rows)], [slot % 7 for slot in range(rows)]).result().tokens)
    differ = sum(here != there for here, there in zip(*drawn, strict=True))
    place.row(f"sampler, {rows} rows of {vocab}", differ == 0, differ=differ)


def kernels(place: Place) -> None:
    """Products, attention, norm and sampler at the shapes of an 8B model, beside the ceiling that binds them."""
    for tokens, kind, name in product(TOKENS, ("bfloat16", *PACKED), SHAPES):
        if tokens <= (8 if place.small else 256 if name == "head" else tokens):
            place.attempt(f"{name}, {kind}, {tokens} tokens", measured_product, place, kind, name, tokens)
    steps = [(1, 1, 8192), (8, 1, 8192), (64, 1, 2048), (256, 1, 1024), (1, 8192, 8192), (4, 2048, 2048)]
    for kind, step in product(
        ("bfloat16", "FP8 e4m3", "int8"), [(1, 1, 300), (1, 40, 40)] if place.small else steps
    ):
        place.attempt(f"attention, {kind} cache, {step}", measured_attention, place, kind, *step)
    for rows in (4,) if place.small else (64, 8192):
        x, weight = place.draw(rows, 4096), place.scales(4096)
        by = norm.NormTensors("rms", weight, None, 1e-5)
        work = partial(norm.normalize, place.run, x, place.empty(rows, 4096), by)
        place.rate(f"RMSNorm, {rows} tokens", lambda i, work=work: work(), 2 * x.nbytes)
    for rows, (name, greedy, top_p) in product(
        (1,) if place.small else (1, 64, 256), (("greedy", 1, 1.0), ("seeded", 0, 1.0), ("top-p", 0, 0.9))
    ):
        logits = place.draw(rows, 1024 if place.small else 128_256, dtype=torch.float32)
        numbers = place.numbers([[9, 5, 0, greedy]] * rows, torch.int64)
        reals = place.numbers([[1.0, top_p, 1.0, -1e30]] * rows, torch.float64)
        out = place.empty(rows, dtype=torch.int32)
        work = partial(sample.sample, place.run, logits, None, numbers, reals, out)
        place.rate(f"sampler, {name}, {rows} rows", lambda i, work=work: work(), logits.nbytes)


def measured_product(place: Place, kind: str, name: str, tokens: int) -> None:
    outputs, columns, gated = (32, 128, SHAPES[name][2]) if place.small else SHAPES[name]
    rows = outputs * (2 if gated else 1)
    weights = [Weight(place, kind, rows, columns)]
    copies = 1 if place.small else min(16, max(1, STREAMED // weights[0].nbytes))
    weights += [Weight(place, kind, rows, columns, seed) for seed in range(1, copies)]
    out, (x, scales) = place.empty(tokens, outputs), weights[0].rounded(place.draw(tokens, columns))
    place.rate(
        f"{name}, {kind}, {tokens} tokens", lambda i: weights[i % copies].multiply(x, scales, out, gated),
        weights[0].nbytes + x.nbytes + out.nbytes, 2.0 * tokens * rows * columns,
        "int8" if weights[0].integer else "bf16",
    )  # fmt: skip


def measured_attention(place: Place, kind: str, count: int, queries: int, length: int) -> None:
    heads, groups, width = shape = (4, 2, 32) if place.small else HEADS
    paged = Paged(place, [length] * count, CACHES[kind], *shape, last=queries)
    call, out = paged.prepare(paged.parts, queries > 1, place.run.target.processors)
    token = 2 * groups * width * CACHES[kind].itemsize
    place.rate(
        f"attention, {kind} cache, {count} x {queries} of {length}", lambda i: call(),
        count * length * token + 2 * out.nbytes, 4.0 * heads * width * count * queries * (length - queries / 2),
    )  # fmt: skip
