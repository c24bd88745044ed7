"""Makes the sampling state of a sequence when it takes a slot."""

from __future__ import annotations

from quire.devices.sampling import SlotSampling
from quire.types import NewSeq


def slot_sampling(new: NewSeq) -> SlotSampling:
    """Make the sampling state of a sequence, with the output that it has from before a preemption, if any."""
    request, params = new.request, new.request.sampling
    return SlotSampling(
        seed=request.sample_seed(new.index),
        params=params,
        stop_ids=request.eos_token_ids + tuple(params.stop_token_ids or ()),
        bad_words=request.bad_words_token_ids,
        prompt_tokens=request.tokens,
        output_tokens=new.tokens[len(request.tokens) :],
    )
