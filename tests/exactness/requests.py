"""A mix of requests that touches every sampling parameter, with prompts that share prefixes."""

from __future__ import annotations

import random

from quire import SamplingParams

_GREEDY = {"temperature": 0.0}
PARAMS = [
    SamplingParams(seed=1, max_tokens=30, ignore_eos=True, **_GREEDY),
    SamplingParams(seed=2, max_tokens=40, **_GREEDY),
    SamplingParams(seed=3, max_tokens=25, temperature=0.8),
    SamplingParams(seed=4, max_tokens=25, temperature=1.3, top_k=20),
    SamplingParams(seed=5, max_tokens=25, temperature=1.0, top_p=0.8, min_p=0.02),
    SamplingParams(
        seed=6, max_tokens=25, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.2
    ),
    SamplingParams(seed=7, max_tokens=12, logprobs=3, prompt_logprobs=2, temperature=0.7),
    SamplingParams(seed=8, max_tokens=30, min_tokens=20, logit_bias={257: 30.0, 65: 5.0}),
    SamplingParams(seed=9, max_tokens=20, allowed_token_ids=list(range(60, 90)), stop_token_ids=[66]),
    SamplingParams(seed=10, max_tokens=30, bad_words=["a", "bc"], temperature=0.5, ignore_eos=True),
    SamplingParams(seed=11, max_tokens=60, ignore_eos=True, top_k=3),
    SamplingParams(seed=12, max_tokens=1),
]


def make_prompts() -> list[list[int]]:
    """As many prompts as PARAMS: some alone, some with a common start of odd length, one a prefix of another."""
    rng = random.Random(0)
    common = [rng.randrange(250) for _ in range(37)]
    prompts = [[rng.randrange(250) for _ in range(rng.randrange(1, 70))] for _ in range(5)]
    prompts += [common + [rng.randrange(250) for _ in range(rng.randrange(1, 30))] for _ in range(5)]
    prompts += [common, common + prompts[5][37:40]]
    assert len(prompts) == len(PARAMS)
    return prompts
