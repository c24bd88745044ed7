"""What distances add to the scores of whole sequences, as encoders have them."""

from __future__ import annotations

from typing import Any

from quire.devices.cuda.kernels.rows import sequence_of
from quire.devices.cuda.language import tl, triton
from quire.devices.cuda.launch import Launcher, launch

BLOCK = 256


@triton.jit
def relative(by_query, by_key, places, cu_q, out, sequences, query_stride, key_stride, out_stride, scale, positions,
             span, buckets, B: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """A piece of what one head of a token adds to the scores of the keys of its sequence; 0 behind them."""
    token, head, j = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    sequence = sequence_of(token, cu_q, sequences, B)
    start, stop = tl.load(cu_q + sequence), tl.load(cu_q + sequence + 1)
    known = (j < stop - start) & (token < stop)
    near = head * buckets + tl.load(places + positions - 1 + j + start - token, mask=known, other=0)
    total = tl.zeros([BLOCK], tl.float32)
    if by_query is not None:
        total += tl.load(by_query + token.to(tl.int64) * query_stride + near, mask=known, other=0.0).to(
            tl.float32
        )
    if by_key is not None:
        row = (start + j).to(tl.int64) * key_stride
        total += tl.load(by_key + row + near, mask=known, other=0.0).to(tl.float32)
    place = out + token.to(tl.int64) * out_stride + head * span + j
    tl.store(place, (total * scale).to(out.dtype.element_ty), mask=j < span)


def relative_scores(
    run: Launcher, by_query: Any, by_key: Any, places: Any, cu_q: Any, out: Any, num_heads: int, scale: float
) -> None:
    """RelativeScores [T, N S] of by_query and by_key [T, N B] or None, for places int32 [2 P - 1]."""
    given = by_query if by_key is None else by_key
    span, batch = out.shape[1] // num_heads, cu_q.shape[0] - 1
    strides = (0 if x is None else x.stride(0) for x in (by_query, by_key))
    launch(
        run, relative, (out.shape[0], num_heads, triton.cdiv(span, BLOCK)), by_query, by_key, places, cu_q, out, batch,
        *strides, out.stride(0), float(scale), (places.shape[0] + 1) // 2, span,
        0 if given is None else given.shape[1] // num_heads, B=triton.next_power_of_2(batch), BLOCK=BLOCK,
    )  # fmt: skip
