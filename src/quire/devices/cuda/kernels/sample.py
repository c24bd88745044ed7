"""Draws a token from each row of logits, the CPU's, bit for bit: devices/reference defines every step.

Sums are of integers, so their order does not matter; noise and its logarithms are made of float64 operations that round
by themselves. What is kept is what ranks from a threshold on, which is found bit by bit, without sorting.
"""

from __future__ import annotations

from typing import Any

from quire.devices.cuda.language import tl, triton
from quire.devices.cuda.launch import Launcher, launch
from quire.devices.cuda.tiles import Shape

NONE = tl.constexpr(float("-inf"))
WEIGHT_BITS = 34
NOTHING, BAD = -1, -2
"""NOTHING and BAD stand in place of a token: no token is allowed; a logit is NaN or +inf."""


@triton.jit
def log(x):
    """The logarithm of devices/reference, float64."""
    bits = x.to(tl.int64, bitcast=True)
    m = ((bits & 0xFFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)
    low, e = m < 0.70710678118654752, (bits >> 52) - 1022
    m, e = tl.where(low, m * 2.0, m), tl.where(low, e - 1, e).to(tl.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = z * 0.0 + 1.0 / 23.0
    for i in tl.static_range(11):
        series = series * z + 1.0 / (21 - 2 * i)
    return e * 0.69314718055994531 + (s * series) * 2.0


@triton.jit
def bits_of(seed, position, token, PART: tl.constexpr):
    none, which = token * 0, token % 4
    a, b, c, d = tl.philox(seed, token // 4, position + none, none, none + PART)
    return tl.where(which == 0, a, tl.where(which == 1, b, tl.where(which == 2, c, d))).to(tl.uint64)


@triton.jit
def gumbel(seed, position, token):
    k = ((bits_of(seed, position, token, 0) << 32) | bits_of(seed, position, token, 1)) >> 12
    u = (k.to(tl.float64) * 2.0 + 1.0) * 1.1102230246251565e-16
    return -log(-log(u))


@triton.jit
def weight(t, BITS: tl.constexpr):
    """e^t for t <= 0, as an integer."""
    t = tl.maximum(t, -80.0)
    n = (t * 1.44269504088896341 + 12582912.0) - 12582912.0  # to the nearest integer
    r = (t - n * 0.693359375) - n * -2.12194440e-4
    y = ((1.9875691500e-4 * r + 1.3981999507e-3) * r + 8.3334519073e-3) * r + 4.1665795894e-2
    y = (y * r + 1.6666665459e-1) * r + 5.0000001201e-1
    y = ((y * (r * r) + r) + 1.0) * ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return ((y.to(tl.float64) * (1 << BITS) + 6755399441055744.0) - 6755399441055744.0).to(tl.int64)


@triton.jit
def piece(logits, masks, row, there, start, stride, words, vocab, BLOCK: tl.constexpr):
    """Logits of rows as they are, as a mask leaves them, and their ids."""
    token = start + tl.arange(0, BLOCK)[None, :]
    known = there & (token < vocab)
    v = tl.load(logits + row * stride + token, mask=known, other=NONE) + 0.0  # -0 becomes 0
    left = v
    if masks is not None:
        allowed = tl.load(masks + row * words + token // 32, mask=known, other=0) >> (token % 32)
        left = tl.where((allowed & 1) == 1, v, NONE)
    return v, left, token


@triton.jit
def ranked(v, token, IDS: tl.constexpr):
    """Numbers in the order of logits, the lower id first among equals."""
    bits = v.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << IDS) + ((1 << IDS) - 1 - token)


@triton.jit
def measured(logits, masks, row, there, stride, words, vocab, top, inverse, low, threshold, WEIGHED: tl.constexpr,
             IDS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Count the tokens of each row that min_p and a threshold keep, or add up their weights."""
    total = threshold * 0
    for start in range(0, vocab, BLOCK):
        _, v, token = piece(logits, masks, row, there, start, stride, words, vocab, BLOCK)
        t = (v - top) * inverse
        amount = weight(t, BITS) if WEIGHED else (token * 0 + 1).to(tl.int64)
        kept = (t >= low) & (ranked(v, token, IDS) >= threshold)
        total += tl.sum(tl.where(kept, amount, 0), 1)[:, None]
    return total


@triton.jit
def searched(logits, masks, row, there, stride, words, vocab, top, inverse, low, floor, need, WEIGHED: tl.constexpr,
             IDS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The greatest threshold that keeps as much as is needed of what the threshold `floor` keeps."""
    one = floor * 0 + 1
    found = -(one << (31 + IDS))
    for i in range(32 + IDS):
        tried = found + (one << (31 + IDS - i))
        kept = measured(logits, masks, row, there, stride, words, vocab, top, inverse, low, tl.maximum(tried, floor),
                        WEIGHED, IDS, BITS, BLOCK)  # fmt: skip
        found = tl.where(kept.to(tl.float64) >= need, tried, found)
    return tl.maximum(found, floor)


@triton.jit(do_not_specialize=["rows"])
def sampled(logits, masks, numbers, reals, out, rows, stride, words, vocab, IDS: tl.constexpr, BITS: tl.constexpr,
            ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    row, there = own.to(tl.int64), own < rows
    number, real = numbers + row * 4, reals + row * 4
    seed, position = tl.load(number, mask=there, other=0), tl.load(number + 1, mask=there, other=0)
    top_k, greedy = tl.load(number + 2, mask=there, other=0), tl.load(number + 3, mask=there, other=1)
    wide, top_p = tl.load(real, mask=there, other=1.0), tl.load(real + 1, mask=there, other=1.0)
    inverse = tl.load(real + 2, mask=there, other=1.0).to(tl.float32)
    low = tl.load(real + 3, mask=there, other=0.0).to(tl.float32)
    top, wrong = (own * 0).to(tl.float32) + NONE, own * 0
    best = tl.zeros([ROWS, BLOCK], tl.float64) + NONE
    where = tl.zeros([ROWS, BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        raw, v, token = piece(logits, masks, row, there, start, stride, words, vocab, BLOCK)
        wrong += tl.sum(tl.where(raw < float("inf"), 0, 1), 1)[:, None]
        where, best = tl.where(v > best, token, where), tl.maximum(best, v.to(tl.float64))
    top = tl.max(best, 1)[:, None].to(tl.float32)
    floor = top_k * 0 - (1 << (31 + IDS))
    drawing = (greedy == 0) & (wrong == 0) & (top > NONE)
    if tl.max(tl.max((drawing & (top_k > 0)).to(tl.int32), 1), 0) > 0:
        count = measured(logits, masks, row, there, stride, words, vocab, top, inverse, low, floor, False, IDS, BITS,
                         BLOCK)  # fmt: skip
        found = searched(logits, masks, row, there, stride, words, vocab, top, inverse, low, floor,
                         top_k.to(tl.float64), False, IDS, BITS, BLOCK)  # fmt: skip
        floor = tl.where((top_k > 0) & (top_k < count), found, floor)
    if tl.max(tl.max((drawing & (top_p < 1.0)).to(tl.int32), 1), 0) > 0:
        total = measured(logits, masks, row, there, stride, words, vocab, top, inverse, low, floor, True, IDS, BITS,
                         BLOCK)  # fmt: skip
        need = tl.maximum(top_p * total.to(tl.float64), 0.5)
        found = searched(logits, masks, row, there, stride, words, vocab, top, inverse, low, floor, need, True, IDS,
                         BITS, BLOCK)  # fmt: skip
        floor = tl.where(top_p < 1.0, found, floor)
    if tl.max(tl.max(drawing.to(tl.int32), 1), 0) > 0:
        drawn, at = tl.zeros([ROWS, BLOCK], tl.float64) + NONE, tl.zeros([ROWS, BLOCK], tl.int32)
        for start in range(0, vocab, BLOCK):
            _, v, token = piece(logits, masks, row, there, start, stride, words, vocab, BLOCK)
            kept = ((v - top) * inverse >= low) & (ranked(v, token, IDS) >= floor)
            x = (v.to(tl.float64) - top.to(tl.float64)) * wide + gumbel(seed, position.to(tl.int32), token)
            x = tl.where(kept, x, NONE)
            at, drawn = tl.where(x > drawn, token, at), tl.maximum(drawn, x)
        best, where = tl.where(drawing, drawn, best), tl.where(drawing, at, where)
    most = tl.max(best, 1)[:, None]
    token = tl.min(tl.where(best == most, where, vocab), 1)[:, None]
    token = tl.where(wrong > 0, -2, tl.where(top > NONE, token, -1))
    tl.store(out + row, token, mask=there)


def sample(run: Launcher, logits: Any, masks: Any, numbers: Any, reals: Any, out: Any) -> None:
    """Draw from rows of float32 logits [L, V]: ids int32 [L], or NOTHING or BAD.

    masks int32 [L, words] or None; numbers int64 [L, 4]: seed, position, top_k, greedy; reals float64 [L, 4]:
    1 / temperature, top_p, and as float32 values 1 / temperature and the least scaled logit.
    """
    (rows, vocab), ids = logits.shape, (logits.shape[1] - 1).bit_length()
    tall, block = (1, 1024) if run.target.family != "interpreter" else (1024, triton.next_power_of_2(vocab))
    launch(
        run, sampled, (triton.cdiv(rows, tall), 1, 1), logits, masks, numbers, reals, out, rows, logits.stride(0),
        0 if masks is None else masks.shape[1], vocab, IDS=ids, BITS=min(WEIGHT_BITS, 53 - ids),
        ROWS=min(tall, triton.next_power_of_2(rows)), BLOCK=block, shape=Shape(8, 1),
    )  # fmt: skip
