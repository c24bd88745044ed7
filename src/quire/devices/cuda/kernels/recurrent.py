"""Operations that carry a state from token to token: scans, token by token in float32, and causal convolutions.

A program has a state's rows and a block of its columns. It replays the open rows of a sequence, then takes in the
tokens of the step, and stores the state wherever the step asks for it. So where a step ends changes no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quire.devices.cuda.kernels.math import NUMBERS, activate, exp, sigmoid
from quire.devices.cuda.language import tl, triton
from quire.devices.cuda.launch import Launcher, launch
from quire.devices.cuda.tiles import Shape

Kind = Literal["delta", "space", "selective", "gated"]


@triton.jit
def unit(x):
    """A vector of length 1."""
    return tl.div_rn(x, tl.sqrt_rn(tl.sum(x * x, 0) + 1e-6))


@triton.jit
def lost(a):
    """1 - e^a for a <= 0, by its series where the difference would lose digits."""
    series = 1.0 + a / 3.0 * (1.0 + a / 4.0 * (1.0 + a / 5.0 * (1.0 + a / 6.0 * (1.0 + a / 7.0))))
    return tl.where(a > -0.3, -a * (1.0 + a / 2.0 * series), 1.0 - exp(a))


@triton.jit
def advanced(state, keys, values, steps, betas, rate, first, row, column, bound, least, most, KIND: tl.constexpr,
             ROWS: tl.constexpr, COLUMNS: tl.constexpr, BY_ROW: tl.constexpr, TIMED: tl.constexpr):  # fmt: skip
    """The state after a token that the pointers are of; `first`: it is the first of its sequence."""
    there = column < COLUMNS
    v = tl.load(values + column, mask=there, other=0.0).to(tl.float32)
    if KIND == "gated":
        a = -rate * tl.load(steps + column, mask=there, other=0.0).to(tl.float32)
        v *= tl.load(betas + column, mask=there, other=0.0).to(tl.float32)
        state = state * exp(a)[None, :] + (tl.where(first, 1.0, tl.sqrt_rn(lost(2.0 * a))) * v)[None, :]
    else:
        k = tl.load(keys + row, mask=row < ROWS, other=0.0).to(tl.float32)
        if KIND == "delta":
            each: tl.constexpr = 1 if BY_ROW else 0
            g = rate * tl.load(steps + row * each, mask=row < ROWS, other=0.0).to(tl.float32)
            k, g = unit(k), tl.where(bound < 0.0, bound * sigmoid(g), -g)
            state = state * exp(g)[:, None]
            v = (v - tl.sum(state * k[:, None], 0)) * tl.load(betas).to(tl.float32)
            state += k[:, None] * v[None, :]
        else:
            dt = v * 0.0 + 1.0
            if TIMED:
                by_column: tl.constexpr = 1 if KIND == "selective" else 0
                dt = tl.load(steps + column * by_column, mask=there, other=0.0).to(tl.float32)
                dt = tl.minimum(tl.maximum(dt, least), most)
            state = state * exp(-rate * dt[None, :]) + k[:, None] * (dt * v)[None, :]
    return state


@triton.jit(do_not_specialize=["open_stride"])
def scanned(
    keys, values, steps, betas, queries, rates, skips, out, states, waiting, rows, opened, fresh, cu_q, firsts, targets,
    key_stride, value_stride, step_stride, beta_stride, query_stride, out_stride, open_stride, width,
    key_place, value_place, step_place, beta_place, bound, least, most, scale,
    KIND: tl.constexpr, HEADS: tl.constexpr, EACH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BY_ROW: tl.constexpr, TIMED: tl.constexpr, A: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    b, head, row = tl.program_id(0), tl.program_id(1), tl.arange(0, A)
    column = tl.program_id(2) * C + tl.arange(0, C)
    there, inside = column < COLUMNS, (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    of_key, of_value, of_step = head // EACH * ROWS, head * COLUMNS, head * (ROWS if BY_ROW else 1)
    if KIND == "selective":  # [C, N]
        rate = tl.load(rates + column[None, :] * ROWS + row[:, None], mask=inside, other=0.0)
    elif KIND == "gated":
        rate = tl.load(rates + column, mask=there, other=0.0)
    else:
        rate = tl.load(rates + head)
    own, is_fresh = tl.load(rows + b).to(tl.int64), tl.load(fresh + b) != 0
    cell = (head * ROWS + row[:, None]) * COLUMNS + column[None, :]
    state = tl.load(states + own * (HEADS * ROWS * COLUMNS) + cell, mask=inside & (is_fresh == 0), other=0.0)
    replayed, start = tl.load(opened + b), tl.load(cu_q + b).to(tl.int64)
    for i in range(replayed):
        given = waiting + own * open_stride + i * width
        state = advanced(
            state, given + key_place + of_key, given + value_place + of_value, given + step_place + of_step,
            given + beta_place + head, rate, is_fresh & (i == 0), row, column, bound, least, most, KIND, ROWS, COLUMNS,
            BY_ROW, TIMED,
        )  # fmt: skip
    is_fresh, done = is_fresh & (replayed == 0), replayed * 0
    for target in range(tl.load(firsts + b), tl.load(firsts + b + 1)):
        stop = tl.load(targets + target * 2)
        for i in range(done, stop):
            t = start + i
            state = advanced(
                state, keys + t * key_stride + of_key, values + t * value_stride + of_value,
                steps + t * step_stride + of_step, betas + t * beta_stride + head, rate, is_fresh & (i == 0), row,
                column, bound, least, most, KIND, ROWS, COLUMNS, BY_ROW, TIMED,
            )  # fmt: skip
            if KIND == "gated":
                y = tl.sum(state, 0)
            else:
                q = tl.load(queries + t * query_stride + of_key + row, mask=row < ROWS, other=0.0)
                q = q.to(tl.float32)
                if KIND == "delta":
                    q = unit(q) * scale
                y = tl.sum(state * q[:, None], 0)
            if skips is not None:
                v = tl.load(values + t * value_stride + of_value + column, mask=there, other=0.0)
                of_skip = column if KIND == "selective" else head + column * 0
                y += tl.load(skips + of_skip, mask=there, other=0.0) * v.to(tl.float32)
            tl.store(out + t * out_stride + of_value + column, y.to(out.dtype.element_ty), mask=there)
        done = stop
        kept = tl.load(targets + target * 2 + 1).to(tl.int64)
        tl.store(states + kept * (HEADS * ROWS * COLUMNS) + cell, state, mask=inside & (kept >= 0))


@triton.jit
def history(x, states, waiting, own, start, replayed, is_fresh, i, channel, known, x_stride, open_stride, width,
            LENGTH: tl.constexpr):  # fmt: skip
    """Inputs of channels at places i of a step's sequence; before 0 they lie in open rows, then in the state."""
    old = i + replayed
    given = tl.load(x + (start + i) * x_stride + channel, mask=known & (i >= 0), other=0.0).to(tl.float32)
    open_row = waiting + own * open_stride + old * width + channel
    given += tl.load(open_row, mask=known & (i < 0) & (old >= 0), other=0.0)
    cell = states + (own * LENGTH + LENGTH + old) * width + channel
    return given + tl.load(cell, mask=known & (old < 0) & (is_fresh == 0), other=0.0)


@triton.jit(do_not_specialize=["open_stride"])
def convolved(x, weight, bias, out, states, waiting, rows, opened, fresh, cu_q, sequences, width, x_stride, out_stride,
              open_stride, TAPS: tl.constexpr, DILATION: tl.constexpr, ACTIVATION: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    t, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b, there = tl.load(sequences + t), channel < width
    own, start = tl.load(rows + b).to(tl.int64), tl.load(cu_q + b).to(tl.int64)
    replayed, is_fresh, total = tl.load(opened + b), tl.load(fresh + b) != 0, tl.zeros([BLOCK], tl.float32)
    for tap in range(TAPS):
        i = t - start - (TAPS - 1 - tap) * DILATION
        seen = history(x, states, waiting, own, start, replayed, is_fresh, i, channel, there, x_stride, open_stride,
                       width, (TAPS - 1) * DILATION)  # fmt: skip
        total += tl.load(weight + channel * TAPS + tap, mask=there, other=0.0) * seen
    if bias is not None:
        total += tl.load(bias + channel, mask=there, other=0.0)
    tl.store(
        out + t.to(tl.int64) * out_stride + channel,
        activate(total, ACTIVATION).to(out.dtype.element_ty),
        mask=there,
    )


@triton.jit(do_not_specialize=["open_stride"])
def ngrams(
    x, addresses, sizes, multipliers, out, states, waiting, rows, opened, fresh, cu_q, sequences, width, out_stride,
    open_stride, END: tl.constexpr, LENGTH: tl.constexpr, EACH: tl.constexpr, NUMBER: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One token's row of one table: a hash of its id and of those before it, as far back as an end."""
    t, table, d = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    b = tl.load(sequences + t)
    own, start = tl.load(rows + b).to(tl.int64), tl.load(cu_q + b).to(tl.int64)
    replayed, is_fresh = tl.load(opened + b), tl.load(fresh + b) != 0
    mixed, ended = start * 0, t < 0
    for back in range(table // EACH + 2):
        i = t - start - back
        seen = history(
            x, states, waiting, own, start, replayed, is_fresh, i, 0, t >= 0, 1, open_stride, 1, LENGTH
        )
        number = seen.to(tl.int64) + END
        mixed = mixed ^ (tl.where(ended, END, number) * tl.load(multipliers + back))
        ended = ended | ((back > 0) & (number == END))
    source = tl.load(addresses + table).to(tl.pointer_type(NUMBER)) + mixed % tl.load(sizes + table) * width
    v = tl.load(source + d, mask=d < width, other=0.0)
    tl.store(
        out + t.to(tl.int64) * out_stride + table * width + d, v.to(out.dtype.element_ty), mask=d < width
    )


@triton.jit(do_not_specialize=["open_stride"])
def moved(x, states, waiting, rows, opened, fresh, cu_q, firsts, targets, width, x_stride, open_stride,
          LENGTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Store the last inputs of a sequence wherever the step asks for them, at last in its own row."""
    b, channel = tl.program_id(0), (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    place = tl.arange(0, PADDED)[:, None]
    known = (place < LENGTH) & (channel < width)
    own, start = tl.load(rows + b).to(tl.int64), tl.load(cu_q + b).to(tl.int64)
    replayed, is_fresh = tl.load(opened + b), tl.load(fresh + b) != 0
    for target in range(tl.load(firsts + b), tl.load(firsts + b + 1)):
        i = tl.load(targets + target * 2) - LENGTH + place
        kept = tl.load(targets + target * 2 + 1).to(tl.int64)
        seen = history(x, states, waiting, own, start, replayed, is_fresh, i, channel, known, x_stride, open_stride,
                       width, LENGTH)  # fmt: skip
        tl.debug_barrier()
        tl.store(states + (kept * LENGTH + place) * width + channel, seen, mask=known & (kept >= 0))


@triton.jit(do_not_specialize=["open_stride"])
def set_open(
    x, waiting, rows, kept, cu_q, sequences, size, place, x_stride, open_stride, width, BLOCK: tl.constexpr
):
    """Store a token's input in the open rows of its sequence, if its state has not taken it in."""
    t, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b = tl.load(sequences + t)
    i = t - tl.load(cu_q + b) - tl.load(kept + b)
    v = tl.load(x + t.to(tl.int64) * x_stride + at, mask=(at < size) & (i >= 0), other=0.0).to(tl.float32)
    row = waiting + tl.load(rows + b).to(tl.int64) * open_stride + i * width + place
    tl.store(row + at, v, mask=(at < size) & (i >= 0))


@dataclass(frozen=True, slots=True)
class StateStep:
    """The states of a step's sequences, int32: rows, opened, fresh (1: no state yet), kept [B]; cu_q [B + 1].

    Sequence b takes in its tokens up to targets[i, 0], then stores its state in row targets[i, 1], -1: nowhere, for i
    from firsts[b] up to firsts[b + 1]; before the last one, of all its tokens, comes its own row. `sequences` [T] are
    those of tokens. `opens`: a sequence has tokens that its state does not take in.
    """

    opens: bool
    rows: Any
    opened: Any
    fresh: Any
    kept: Any
    cu_q: Any
    firsts: Any
    targets: Any
    sequences: Any


@dataclass(frozen=True, slots=True)
class State:
    """The rows of one state of a layer [rows, ...], and their open rows [rows, open, W]; float32."""

    rows: Any
    waiting: Any


@dataclass(frozen=True, slots=True)
class Scan:
    """A scan: its kind, the state [heads, rows, columns], the heads that share a key, and the numbers of its formula.

    `by_row`: the steps of a delta rule are one for each row of a state.
    """

    kind: Kind
    heads: int
    rows: int
    columns: int
    each: int = 1
    by_row: bool = False
    bound: float = 0.0
    least: float = 0.0
    most: float = float("inf")


WAVE = Shape(4, 1)


def scan(
    run: Launcher,
    about: Scan,
    parts: Sequence[Any],
    queries: Any,
    rates: Any,
    out: Any,
    state: State,
    step: StateStep,
    skips: Any = None,
) -> None:
    """Scan tokens: [T, heads columns]. `parts` are what an open row holds, side by side.

    delta: keys, values, steps, beta; space: x, B, and dt if there is one; selective: x, dt, B; gated: x, both gates.
    """
    places = [sum(part.shape[1] for part in parts[:i]) for i in range(len(parts))]
    orders = {"delta": (0, 1, 2, 3), "space": (1, 0, 2, 0), "selective": (2, 0, 1, 0), "gated": (0, 0, 2, 1)}
    timed = len(parts) > 2
    order = [place if place < len(parts) else 0 for place in orders[about.kind]]
    given = [parts[i] for i in order]
    block = 64 if about.rows == 1 else 32 if about.rows <= 128 else 16
    if run.target.family == "interpreter":
        block = triton.next_power_of_2(about.columns)
    launch(
        run, scanned, (step.rows.shape[0], about.heads, triton.cdiv(about.columns, block)), *given, queries, rates,
        skips, out, state.rows, state.waiting, step.rows, step.opened, step.fresh, step.cu_q, step.firsts, step.targets,
        *(part.stride(0) for part in given), queries.stride(0), out.stride(0), state.waiting.stride(0),
        state.waiting.shape[2], *(places[i] for i in order), float(about.bound), float(about.least), float(about.most),
        about.rows**-0.5, KIND=about.kind, HEADS=about.heads, EACH=about.each, ROWS=about.rows, COLUMNS=about.columns,
        BY_ROW=about.by_row, TIMED=timed, A=triton.next_power_of_2(about.rows), C=block, shape=WAVE,
    )  # fmt: skip
    keep_open(run, parts, state, step)


def keep_open(run: Launcher, parts: Sequence[Any], state: State, step: StateStep) -> None:
    """Keep the inputs of tokens that states do not take in: parts [T, W] side by side."""
    place = 0
    for part in parts if step.opens else ():
        size = part.shape[1]
        launch(
            run, set_open, (part.shape[0], triton.cdiv(size, 1024), 1), part, state.waiting, step.rows, step.kept,
            step.cu_q, step.sequences, size, place, part.stride(0), state.waiting.stride(0), state.waiting.shape[2],
            BLOCK=1024, shape=WAVE,
        )  # fmt: skip
        place += size


def convolve(
    run: Launcher,
    x: Any,
    weight: Any,
    out: Any,
    state: State,
    step: StateStep,
    bias: Any = None,
    activation: str | None = None,
    dilation: int = 1,
) -> None:
    """A causal convolution of each channel by itself, weight [C, taps] float32: [T, C] -> [T, C]."""
    width, taps = weight.shape
    launch(
        run, convolved, (x.shape[0], triton.cdiv(width, 1024), 1), x, weight, bias, out, state.rows, state.waiting,
        step.rows, step.opened, step.fresh, step.cu_q, step.sequences, width, x.stride(0), out.stride(0),
        state.waiting.stride(0), TAPS=taps, DILATION=dilation, ACTIVATION=activation or "", BLOCK=1024, shape=WAVE,
    )  # fmt: skip
    move(run, x, state, step)


def move(run: Launcher, x: Any, state: State, step: StateStep) -> None:
    """Keep the last inputs [T, C] of sequences as the state of a convolution."""
    length, width = state.rows.shape[1:]
    launch(
        run, moved, (step.rows.shape[0], triton.cdiv(width, 256), 1), x, state.rows, state.waiting, step.rows,
        step.opened, step.fresh, step.cu_q, step.firsts, step.targets, width, x.stride(0), state.waiting.stride(0),
        LENGTH=length, PADDED=triton.next_power_of_2(length), BLOCK=256, shape=WAVE,
    )  # fmt: skip
    keep_open(run, [x], state, step)


def embed_ngrams(
    run: Launcher,
    x: Any,
    tables: Any,
    sizes: Any,
    multipliers: Any,
    end: int,
    number: Any,
    out: Any,
    state: State,
    step: StateStep,
) -> None:
    """Rows of tables (addresses int64, sizes int32) side by side: x float32 [T, 1] are ids less `end`."""
    count, length = tables.shape[0], state.rows.shape[1]
    width = out.shape[1] // count
    launch(
        run, ngrams, (x.shape[0], count, 1), x, tables, sizes, multipliers, out, state.rows, state.waiting, step.rows,
        step.opened, step.fresh, step.cu_q, step.sequences, width, out.stride(0), state.waiting.stride(0), END=end,
        LENGTH=length, EACH=count // length, NUMBER=NUMBERS[number], BLOCK=triton.next_power_of_2(width), shape=WAVE,
    )  # fmt: skip
    move(run, x, state, step)
