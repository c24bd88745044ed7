"""Admits other kernels to products, by bits: per weight and device, at a first start, never per step.

A form runs beside our kernel on random rows. With our bits it may serve the numbers of rows at which it is faster; with
bits of its own, the same for any number of rows, it may serve all. Time chooses among these alone. No form is asked for
a number of rows at which it was not tried: other products are made of pieces.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from quire.devices.cuda.arena import PIECE, Arena
from quire.devices.cuda.encoders.products import ending_of, multiply, residual_of
from quire.devices.cuda.kernels import few
from quire.devices.cuda.launch import Launcher
from quire.devices.cuda.libraries import OURS, SINGLE, Form, Library, installed
from quire.devices.cuda.pack import CudaMatrix, own_matrix
from quire.devices.cuda.selfcheck import Checks, Verdict, Verdicts, described, fingerprint
from quire.devices.graph import Graph, widths
from quire.devices.ops import AllGather, AllReduce, GatedLinear, Linear, Receive, Value
from quire.devices.protocol import KVSpec, Limits
from quire.errors import QuireError

if TYPE_CHECKING:
    from quire.devices.cuda.record import Call, Recorder
    from quire.devices.cuda.step import CudaStep

log = logging.getLogger("quire.devices")

SIZES = (
    *(1, 2, 4, 8, 16, 17, 24, 32, 40, 48, 56, 64, 65, 80, 96, 112), *range(128, 513, 32), 1024, 2048
)  # fmt: skip
"""SIZES are the rows at which forms are tried. Steps of graphs have them."""
LARGE = 512  # rows of pieces of our bits
ROOM = 256 << 20  # bytes of sums before their end, at most
CODE = 8  # bytes of each code of a weight while a library copies it, at most
CHECKED = 16  # rows beside float64
DECODING, SHARE = 64, 4  # rows of steps that count SHARE times when one form is to serve all
FASTER = 0.97  # of the seconds of our kernel
REPEATS, ROUNDS = 5, 5
REFUSED = Verdict(False, False, ())
EXCHANGES = AllReduce, AllGather, Receive
Compute = Callable[[Any, Any, Any], None]


@dataclass(frozen=True, slots=True)
class Admission:
    """Libraries to try. Unless `exact`, any right form may serve. `every` admits forms that have bits of their own."""

    libraries: Sequence[Library]
    checks: Checks
    exact: bool
    every: bool

    @classmethod
    def of(cls, choice: str, checks: Checks, exact: bool) -> Admission | None:
        """Read --libraries: auto, none or all. None: our invariant kernels compute everything."""
        if not exact:
            log.warning(
                "--no-batch-invariant: kernels are chosen by speed for each size of a step, so tokens of a request may "
                "depend on the requests beside it, on chunks and on cached prefixes"
            )
        others = [] if choice == "none" else installed(exact, choice == "all")
        found = [*(() if exact else OURS), *others]
        return cls(found, checks, exact, choice == "all") if found else None

    def key(self, device: Any, target: str) -> str:
        """Name what verdicts depend on beside the product."""
        others = " and ".join(f"{library.name} {library.version}" for library in self.libraries)
        return f"{fingerprint(device, target)}, {'bits' if self.exact else 'time'}: {others}"

    def replaces(self, graph: Graph, limits: Limits) -> bool:
        """Tell whether forms of other bits may serve: nobody else must have bits like this one's."""
        alone = graph.logits is not None and not limits.max_adapters
        return self.every and alone and not any(isinstance(op, EXCHANGES) for op in graph.ops)

    def products(
        self, graph: Graph, arena: Arena, spec: KVSpec, limits: Limits
    ) -> Iterator[tuple[int, str, dict[str, Library]]]:
        """Products that libraries may compute: their places and names, and the libraries by names of verdicts."""
        every, sizes, ops = self.replaces(graph, limits), widths(graph, spec), list[Any](graph.ops)
        for index, op in enumerate(ops):
            if type(op) in (Linear, GatedLinear) and not own_matrix(op.weight).rounds:
                about = f"{' bias' * (op.bias is not None)} {arena.places[index].dtype}{' or ours' * every}"
                name = f"{described(op, index, sizes)}{about}"
                yield index, name, {f"{library.name} for {name}": library for library in self.libraries}

    def room(self, graph: Graph, arena: Arena, spec: KVSpec, limits: Limits, key: str) -> int:
        """Bytes of sums, of copies by libraries that serve or were not tried, and of codes while one is made."""
        known, ops, copied, most = self.checks.of(key), list[Any](graph.ops), 0, 0
        for index, _, names in self.products(graph, arena, spec, limits):
            weight = own_matrix(ops[index].weight)
            for name, library in names.items():
                if (name not in known or known[name].sizes) and (nbytes := library.copied(weight)):
                    copied, most = copied + nbytes, max(most, CODE * weight.shape[0] * weight.shape[1])
        return ROOM + copied + most


@dataclass(frozen=True, slots=True)
class Product:
    """The product of an operation, as functions of x, out and a residual."""

    run: Launcher
    weight: CudaMatrix
    bias: Any
    activation: Any
    limit: float
    gated: bool

    @classmethod
    def of(cls, recorder: Recorder, op: Any) -> Product:
        return cls(recorder.run, own_matrix(op.weight), *ending_of(recorder, op))

    def ours(self, x: Any, out: Any, residual: Any) -> None:
        about = self.bias, self.activation, residual, self.limit, self.gated
        multiply(self.run, x, (x, None), self.weight, out, *about)

    def end(self, sums: Any, out: Any, residual: Any) -> None:
        few.end(self.run, sums, out, self.bias, self.activation, residual, self.limit, self.gated)

    def by(self, form: Form, x: Any, out: Any, residual: Any) -> None:
        """Compute by a form; in float32, if it can, and with our end where something follows the sums."""
        x = x if self.weight.dtype is None else x.to(self.weight.dtype)
        follows = (
            form.parts or self.gated or any(one is not None for one in (self.bias, self.activation, residual))
        )
        if not follows and out.dtype in form.types:
            return form.multiply(x, out)
        dtype = SINGLE if SINGLE in form.types else form.types[0]
        sums = torch.empty(len(x), max(form.parts, 1), self.weight.shape[0], dtype=dtype, device=x.device)
        form.multiply(x, sums if form.parts else sums[:, 0])
        self.end(sums, out, residual)

    def exactly(self, x: Any, residual: Any) -> Any:
        """Compute the sums in float64, and the rest in float32."""
        sums = [x.double() @ piece.double().T for piece in self.weight.dense(SINGLE).split(1024)]
        out = torch.empty(len(x), self.weight.shape[0] // (1 + self.gated), device=x.device)
        self.end(torch.cat(sums, 1).float()[:, None], out, residual)
        return out


def pieces(
    rows: int, forms: Mapping[int, Form], exact: bool, whole: bool
) -> Iterator[tuple[int, int, Form | None]]:
    """Ranges of rows and the form of each, None for our kernel; forms by size, ascending, serve all if `whole`."""
    if not exact:
        size = next((size for size in forms if size >= rows), rows)
        yield 0, rows, forms.get(size)
        return
    start = 0
    while start < rows:
        left = rows - start
        fits = [size for size in forms if size == left or (size < left and (whole or size >= LARGE))]
        size = max(fits, default=left)
        yield start, start + size, forms.get(size)
        start += size


def admit(
    admission: Admission, graph: Graph, calls: Sequence[Call], recorder: Recorder, arena: Arena, spec: KVSpec,
    limits: Limits, wrong: Sequence[int],
) -> list[Call]:  # fmt: skip
    """The launches of a graph, with products by what is admitted. What was not tried before is tried now."""
    exact, checks, made, told = admission.exact, admission.checks, [*calls], Counter[str]()
    key, every = admission.key(recorder.device, recorder.run.target.name), admission.replaces(graph, limits)
    ops: Sequence[Any] = graph.ops
    for index, name, names in admission.products(graph, arena, spec, limits):
        if index in wrong:
            continue
        op = ops[index]
        product, place = Product.of(recorder, op), arena.places[index]
        about = arena.places[op.x].dtype, place.dtype, residual_of(op) is not None
        if not names.keys() <= checks.of(key).keys():
            checks.add(key, dict.fromkeys(names, REFUSED))  # of what does not live to see a verdict
            most = limits.max_logit_rows if place.kind == PIECE else limits.max_tokens
            most = max(1, min(most, ROOM // (4 * product.weight.shape[0])))
            tried = [size for size in SIZES if size <= most]
            try:
                checks.add(key, judge(product, names, about, tried, exact, every))
            except (RuntimeError, QuireError) as error:
                log.warning("no library computes %s: none can be tried (%s)", name, str(error)[:200])
        found = {name: checks.of(key)[name] for name in names}
        forms = dict[int, Form]()
        for name, verdict in found.items():
            told[f"{names[name].name} {_said(verdict, exact)}"] += 1
            if form := names[name].form(recorder.run, product.weight, about[0]) if verdict.sizes else None:
                forms |= dict.fromkeys(verdict.sizes or (), form)
        if forms:
            whole = any(verdict.sizes and not verdict.exact for verdict in found.values())
            given = dict(sorted(forms.items())), exact, whole
            made[index] = _served(op, Value(index), product, given, calls[index])
    if told:
        log.info("products: %s", "; ".join(f"{said} {count}" for said, count in sorted(told.items())))
    return made


def _said(verdict: Verdict, exact: bool) -> str:
    if verdict.sizes:
        return "serves" if verdict.exact or not exact else "replaces ours in"
    if not verdict.accurate:
        return "cannot compute"
    return "is not faster in" if verdict.exact or not exact else "has other bits in"


def launch_ends(graph: Graph, recorder: Recorder, arena: Arena) -> None:
    """Launch the ends of products, as libraries may need them, over tensors without values."""
    ops: Sequence[Any] = graph.ops
    for op, place in zip(ops, arena.places, strict=True):
        if type(op) in (Linear, GatedLinear) and not own_matrix(op.weight).rounds:
            product, empty = Product.of(recorder, op), partial(torch.empty, device=recorder.device)
            added = residual_of(op) is not None
            for dtype in dict.fromkeys((place.dtype, SINGLE)):
                given = empty(1, place.width, dtype=place.dtype) if added else None
                product.end(empty(1, 1, op.weight.shape[0]), empty(1, place.width, dtype=dtype), given)


def _served(op: Any, out: Value, product: Product, given: tuple[Any, bool, bool], ours: Call) -> Call:
    """The launch of a product, in pieces. Steps with adapters go on by our kernel, whose bits are the same then."""

    def call(step: CudaStep) -> None:
        if step.adapters is not None:
            return ours(step)
        x, made, residual = step[op.x], step[out], step.optional(residual_of(op))
        for start, stop, form in pieces(len(x), *given):
            compute: Compute = product.ours if form is None else partial(product.by, form)
            compute(x[start:stop], made[start:stop], None if residual is None else residual[start:stop])
        return None

    return call


@dataclass(frozen=True, slots=True)
class Trial:
    """What a form did: seconds by size, and whether it is right, has our bits, and the same ones at all sizes."""

    seconds: Mapping[int, float]
    accurate: bool
    equal: bool
    steady: bool


def judge(
    product: Product, libraries: Mapping[str, Library], about: tuple[Any, Any, bool], sizes: Sequence[int],
    exact: bool, every: bool,
) -> Verdicts:  # fmt: skip
    """Try libraries at ascending sizes, on an x and for an out of two types, with a residual or without."""
    weight, made, most = product.weight, torch.Generator().manual_seed(1), sizes[-1]
    home = (weight.values if weight.packed is None else weight.packed.codes).device
    width = weight.shape[0] // (1 + product.gated)
    x, added = (torch.randn(most, size, generator=made).to(home) for size in (weight.shape[1], width))
    x, residual = x.to(about[0]), added.to(about[1]) if about[2] else None

    def computed(compute: Compute, size: int) -> tuple[Any, float]:
        """The first rows, poisoned before, and seconds."""
        out = torch.full((size, width), torch.nan, dtype=about[1], device=home)
        rest = None if residual is None else residual[:size]
        return out, seconds(lambda: compute(x[:size], out, rest), home)

    def tried(form: Form) -> Trial:
        """Compare a form with our kernel's rows, with itself, and its first rows with float64."""
        times, accurate, equal, steady, own = dict[int, float](), most_of > 0, True, True, None
        for size in reversed([size for size in sizes if not form.most or size <= form.most]):
            out, times[size] = computed(partial(product.by, form), size)
            own, first = out if own is None else own, min(size, len(wanted))
            accurate &= float((out[:first].float() - wanted[:first]).abs().max()) <= 4 * near
            accurate &= float((out.float() - ours[:size].float()).abs().max()) <= 16 * near  # NaN is not
            equal, steady = equal and _same(out, ours[:size]), steady and _same(out, own[:size])
        return Trial(times, accurate, equal, steady)

    ours, wanted = computed(product.ours, most)[0], product.exactly(x[:CHECKED], residual)
    most_of = float(wanted.abs().max())  # without values a weight proves nothing
    near = float((ours[: len(wanted)].float() - wanted).abs().max()) + 1e-6 * most_of
    trials = dict[str, Trial]()
    for name, library in libraries.items():
        try:
            if form := library.form(product.run, weight, about[0]):
                trials[name] = tried(form)
        except Exception as error:  # whatever a library raises refuses it
            log.debug("%s: %s", name, str(error)[:200])
    times = {size: computed(product.ours, size)[1] for size in sizes} if trials else {}
    served = chosen(trials, times, exact, every)
    judged = {one: Verdict(t.accurate, t.equal, tuple(served.get(one, ()))) for one, t in trials.items()}
    return dict.fromkeys(libraries, REFUSED) | judged


def _same(one: Any, other: Any) -> bool:
    kind = torch.int16 if one.dtype.itemsize == 2 else torch.int32
    return torch.equal(one.view(kind), other.view(kind))


def chosen(
    trials: Mapping[str, Trial], ours: Mapping[int, float], exact: bool, every: bool
) -> dict[str, list[int]]:
    """The sizes that forms serve, by the seconds of our kernel."""

    def beside(trial: Trial, size: int) -> float:
        return trial.seconds[size] / ours[size] if ours[size] else FASTER

    served, best = dict[str, list[int]](), dict.fromkeys(ours, 1.0)
    usable = {name: one for name, one in trials.items() if one.accurate and (one.equal or not exact)}
    for size in ours:
        times = {name: beside(one, size) for name, one in usable.items() if size in one.seconds}
        name = min(times, key=times.__getitem__, default="")
        if name and times[name] <= FASTER:
            served.setdefault(name, []).append(size)
            best[size] = times[name]
    shares = {size: SHARE if size <= DECODING else 1 for size in ours}
    least = FASTER * sum(shares[size] * best[size] for size in ours)
    for name, one in trials.items():
        if exact and every and one.accurate and one.steady and not one.equal:
            taken = sum(shares[size] * beside(one, size) for size in ours)
            if taken <= least:
                served, least = {name: [*ours]}, taken
    return served


def seconds(work: Callable[[], None], device: Any) -> float:
    """Seconds of work, replayed as a graph: what cannot be captured raises. 0 on the CPU, where time proves nothing."""
    work()
    if device.type != "cuda":
        return 0.0
    gpu: Any = torch.cuda
    graph, begin, end = gpu.CUDAGraph(), *(gpu.Event(enable_timing=True) for _ in range(2))
    with gpu.graph(graph, capture_error_mode="thread_local"):
        for _ in range(REPEATS):
            work()
    times = list[float]()
    for _ in range(ROUNDS):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / REPEATS)
    return median(times)
