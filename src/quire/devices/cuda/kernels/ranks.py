"""Sums over ranks: the parts that ranks have are added in float32, in the order of ranks, and rounded once.

Parts lie side by side, or in memory that all ranks reach by tables of addresses. There each rank publishes its part:
that kernel alone waits for other ranks, so the others run in the interpreter too. Counts of its barriers stay on the
device, so a graph may replay them. All ways have the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.devices.cuda.kernels.math import NUMBERS
from quire.devices.cuda.language import tl, triton
from quire.devices.cuda.launch import Launcher, launch

BLOCK = 1024
SPINS = tl.constexpr(1024)  # between looks at the host's memory, which take long
PROGRAMS = 32
"""PROGRAMS publish a part, always as many: each has a count of barriers, and parts lie by turns in two halves.

In the interpreter it is one.
"""


@triton.jit
def of_rank(parts, rank, stride, place, inside, NUMBER: tl.constexpr):
    if NUMBER is None:
        own = parts + rank * stride
    else:
        own = tl.multiple_of(tl.load(parts + rank).to(tl.pointer_type(NUMBER)), 16)
    return tl.load(own + place, mask=inside, other=0.0)


@triton.jit
def of_all(parts, epochs, stride, place, inside, RANKS: tl.constexpr, NUMBER: tl.constexpr):
    """The sum of all ranks' elements at some places."""
    if epochs is not None:
        parts += (tl.load(epochs) & 1) * RANKS
    total = of_rank(parts, 0, stride, place, inside, NUMBER).to(tl.float32)
    for rank in tl.static_range(1, RANKS):
        total += of_rank(parts, rank, stride, place, inside, NUMBER).to(tl.float32)
    return total


@triton.jit
def add_parts(parts, epochs, out, stride, begin, count, RANKS: tl.constexpr, NUMBER: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    place = begin + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < begin + count
    total = of_all(parts, epochs, stride, place, inside, RANKS, NUMBER)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def collect(slices, out, size, count, NUMBER: tl.constexpr, BLOCK: tl.constexpr):
    """Copy the slice of each rank, `size` elements, from where that rank added it."""
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.program_id(1).to(tl.int64) * size + d
    inside = (d < size) & (place < count)
    v = of_rank(slices, tl.program_id(1), 0, place, inside, NUMBER)
    tl.store(out + place, v.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=("rank",))
def publish(x, parts, pads, epochs, count, rank, RANKS: tl.constexpr, LANES: tl.constexpr, NUMBER: tl.constexpr,
            WAITS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Copy x to this rank's part, then wait until this program of all ranks has.

    Its signals are int32 [program, other rank] at pads[rank]. The last address is that of a number which ends waiting.
    """
    program, peer = tl.program_id(0), tl.arange(0, LANES)
    epoch = tl.load(epochs + program) + 1
    if x is not None:
        own = tl.multiple_of(tl.load(parts + (epoch & 1) * RANKS + rank).to(tl.pointer_type(NUMBER)), 16)
        for start in range(program * BLOCK, count, tl.num_programs(0) * BLOCK):
            place = start + tl.arange(0, BLOCK)
            tl.store(own + place, tl.load(x + place, mask=place < count), mask=place < count)
    if WAITS:
        tl.debug_barrier()  # all threads have stored
        others = peer < RANKS
        theirs = (
            tl.load(pads + peer, mask=others, other=0).to(tl.pointer_type(tl.int32)) + program * RANKS + rank
        )
        tl.atomic_xchg(theirs, epoch, mask=others, sem="release", scope="sys")
        mine = tl.load(pads + rank).to(tl.pointer_type(tl.int32)) + program * RANKS + peer
        found = tl.atomic_add(mine, 0, mask=others, sem="acquire", scope="sys")
        spins = 0
        while tl.min(tl.where(others, found - epoch, 0), 0) < 0:  # others may be one ahead
            found = tl.atomic_add(mine, 0, mask=others, sem="acquire", scope="sys")
            spins += 1
            if spins % SPINS == 0:
                stop = tl.load(pads + RANKS).to(tl.pointer_type(tl.int32))
                found = tl.where(tl.load(stop, volatile=True) == 0, found, epoch)
        tl.debug_barrier()
    tl.store(epochs + program, epoch)


@dataclass(frozen=True, slots=True)
class Parts:
    """All ranks' parts of a sum: a tensor [ranks, n], or addresses of elements like `like`, by halves."""

    tensor: Any
    ranks: int
    epochs: Any = None
    like: Any = None

    @property
    def stride(self) -> int:
        return 0 if self.tensor is None or self.like is not None else int(self.tensor[0].numel())

    @property
    def number(self) -> Any:
        return None if self.like is None else NUMBERS[self.like.dtype]


def sum_parts(run: Launcher, parts: Parts, out: Any, begin: int = 0, count: int | None = None) -> None:
    """Add parts to `out`, of their shape: all elements, or `count` of them."""
    count = out.numel() if count is None else count
    launch(
        run, add_parts, (triton.cdiv(count, BLOCK), 1, 1), parts.tensor, parts.epochs, out, parts.stride, begin, count,
        RANKS=parts.ranks, NUMBER=parts.number, BLOCK=BLOCK,
    )  # fmt: skip


def collect_slices(run: Launcher, slices: Any, ranks: int, size: int, like: Any, out: Any) -> None:
    """Gather slices of `size` elements like `like`, at addresses by rank, to `out`."""
    grid = triton.cdiv(size, BLOCK), ranks, 1
    launch(run, collect, grid, slices, out, size, out.numel(), NUMBER=NUMBERS[like.dtype], BLOCK=BLOCK)


def publish_part(
    run: Launcher, x: Any, parts: Any, pads: Any, epochs: Any, rank: int, ranks: int, waits: bool
) -> None:
    """Copy x to this rank's next part, and wait for the others; x is None: wait alone."""
    count, number = (0, None) if x is None else (x.numel(), NUMBERS[x.dtype])
    launch(
        run, publish, (min(PROGRAMS, run.target.processors), 1, 1), x, parts, pads, epochs, count, rank, RANKS=ranks,
        LANES=triton.next_power_of_2(ranks), NUMBER=number, WAITS=waits, BLOCK=BLOCK,
    )  # fmt: skip
