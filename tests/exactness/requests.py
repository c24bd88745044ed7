"""A mix of requests that touches every sampling parameter, with prompts that share prefixes."""

from __future__ import annotations

import random

from quire import SamplingParams, StructuredOutputsParams
from quire.params import RepetitionDetectionParams

_GREEDY = {"temperature": 0.0}
_SCHEMA = {
    "type": "object",
    "properties": {
        "the name": {"type": "string", "maxLength": 6},
        "sizes": {"type": "array", "items": {"enum": [1, 22, 333]}, "maxItems": 3},
        "kind": {"enum": ["a long word", "another"]},
    },
    "required": ["the name", "sizes", "kind"],
    "additionalProperties": False,
}
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
    SamplingParams(seed=13, max_tokens=60, structured_outputs=StructuredOutputsParams(json=_SCHEMA)),
    SamplingParams(
        seed=14,
        max_tokens=50,
        temperature=0.7,
        repetition_penalty=1.1,
        logprobs=1,
        structured_outputs=StructuredOutputsParams(json=_SCHEMA),
    ),
    SamplingParams(
        seed=15,
        max_tokens=40,
        min_tokens=9,
        structured_outputs=StructuredOutputsParams(regex="(ab+c|[0-9]){1,30}"),
    ),
    SamplingParams(
        seed=16, **_GREEDY, structured_outputs=StructuredOutputsParams(choice=["to be", "not to be, or"])
    ),
    SamplingParams(
        seed=17,
        max_tokens=40,
        top_k=2,
        logit_bias={65: 90.0, 66: 90.0},
        ignore_eos=True,
        repetition_detection=RepetitionDetectionParams(max_pattern_size=3, min_count=3),
    ),
    SamplingParams(seed=18, max_tokens=40, ignore_eos=True, thinking_token_budget=9),
]


def make_prompts() -> list[list[int]]:
    """As many prompts as PARAMS: some alone, some with a common start of odd length, one a prefix of another."""
    rng = random.Random(0)
    common = [rng.randrange(250) for _ in range(37)]
    prompts = [[rng.randrange(250) for _ in range(rng.randrange(1, 70))] for _ in range(5)]
    prompts += [common + [rng.randrange(250) for _ in range(rng.randrange(1, 30))] for _ in range(5)]
    prompts += [common, common + prompts[5][37:40]]
    prompts += [common + [rng.randrange(250) for _ in range(4)] for _ in range(2)] + [[7] * 20, [9, 8, 7]]
    prompts += [[5, 6], list(b"think: <think>")]
    assert len(prompts) == len(PARAMS)
    return prompts
