"""Checks the kernels that no operation of a graph launches: sampling with drafts, adapters, and copies of blocks."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from quire.devices.cpu.sampler import NativeSampler
from quire.devices.cuda.cache import CudaKVCache
from quire.devices.cuda.kernels import adapted, experts
from quire.devices.cuda.launch import Launcher
from quire.devices.cuda.sampler import CudaSampler
from quire.devices.cuda.selfcheck import Verdict
from quire.devices.host import HostLogits
from quire.devices.sampling import SlotSampling
from quire.devices.torch.run import TorchLogits
from quire.errors import EngineError
from quire.params import SamplingParams

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.5, top_p=0.9),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=1.0, top_k=9, top_p=0.8),
    SamplingParams(temperature=1.0, presence_penalty=0.5, repetition_penalty=1.2),
]
ROWS, DRAFTED, FEW = 4 * len(PARAMS), 4, 3
RANK, OUTPUTS, COLUMNS, SIZES = 32, 96, 256, (130, 6, 40)


def check_sampler(own: CudaSampler, host: NativeSampler, device: Any) -> Verdict:
    """Draw from random logits beside the CPU, with masks and behind drafts."""
    made, vocab = np.random.default_rng(0), own.vocab_size
    logits = (made.standard_normal((ROWS, vocab)) * 3).astype(np.float32)
    masks = made.integers(0, 1 << 32, (ROWS, -(-vocab // 32)), np.uint32)
    masks[:, 0] |= 1
    drafts = logits[:DRAFTED].argmax(1)
    drafts[2] = (drafts[2] + 1) % vocab

    def drawn(sampler: Any, rows: Any, given: Any) -> list[int]:
        for slot in range(len(rows)):
            sampler.set(slot, SlotSampling(slot * 977, PARAMS[slot % len(PARAMS)], [0] * (slot % 7)))
        places = [slot % 7 for slot in range(len(rows))]
        return list(sampler.sample(rows, [*range(len(rows))], places, None, given).result().tokens)

    def behind(sampler: Any, rows: Any) -> list[int]:
        sampler.set(0, SlotSampling(7, PARAMS[0], [0]))
        places = [*range(1, 1 + DRAFTED)]
        return list(sampler.sample(rows[:DRAFTED], [0] * DRAFTED, places, drafts.tolist()).result().tokens)

    here, there = TorchLogits(torch.from_numpy(logits).to(device)), HostLogits(logits)
    wanted = drawn(host, there, masks), drawn(host, there, None), behind(host, there)
    try:
        found = drawn(own, here, masks), drawn(own, here, None), behind(own, here)
        few = drawn(own, here[:FEW], masks[:FEW])
    except EngineError:  # a token is none of the vocabulary
        return Verdict(False, False)
    return Verdict(found == wanted, few == found[0][:FEW])


def check_adapters(run: Launcher, act: Any, device: Any) -> Verdict:
    """Add what two adapters, and none, change in rows of several steps."""
    made = torch.Generator().manual_seed(1)

    def drawn(*shape: int, dtype: Any) -> Any:
        return torch.randn(shape, generator=made).to(device, dtype)

    downs, ups = (
        [drawn(*shape, dtype=act) for _ in range(2)] for shape in ((RANK, COLUMNS), (OUTPUTS, RANK))
    )
    down_table, up_table = (experts.Weights(experts.addresses(each, device), act) for each in (downs, ups))
    gains, shifts = (drawn(2, OUTPUTS, dtype=torch.float32) for _ in range(2))
    ranks = torch.full((2,), RANK, dtype=torch.int32, device=device)
    changes, results = adapted.Changes(down_table, up_table, ranks, RANK, gains, shifts), list[Any]()
    x, sums = drawn(SIZES[0], COLUMNS, dtype=act) / 16, drawn(SIZES[0], OUTPUTS, dtype=torch.float32)
    slots = (torch.arange(SIZES[0], dtype=torch.int32) % 3 - 1).to(device)
    for size in SIZES:
        empty = partial(torch.empty, device=device)
        rows, inner = adapted.sort_rows(run, slots[:size], 2, act, empty), empty(size, RANK, dtype=act)
        low, out = (torch.full_like(sums[:size], torch.nan) for _ in range(2))
        adapted.shrink(run, x[:size].clone(), changes, rows, inner)
        adapted.expand(run, inner, changes, rows, low)
        adapted.finish(run, sums[:size].clone(), low, slots[:size], changes, out)
        results.append(out)
    wanted = sums.double()
    for slot, (down, up) in enumerate(zip(downs, ups, strict=True)):
        added = (x.double() @ down.double().T) @ up.double().T
        wanted[slots == slot] = ((wanted + added) * gains[slot] + shifts[slot])[slots == slot]
    near = bool(((results[0] - wanted).abs() <= 0.05 * float(wanted.abs().max())).all())
    return Verdict(near, all(torch.equal(out, results[0][: len(out)]) for out in results))


def check_copies(kv: CudaKVCache) -> Verdict:
    """Copy a block to the next one, and that one on."""
    sides = [side for layer in kv.layers for side in (layer.keys, layer.values) if side is not None]
    sides = [side.view(torch.uint8) for side in sides]
    for side in sides:
        side[0] = torch.arange(side[0].numel(), device=side.device).view(side[0].shape) % 251
    kv.copy_blocks([(0, 1), (1, 2)])
    return Verdict(all(torch.equal(side[0], side[to]) for side in sides for to in (1, 2)), True)
