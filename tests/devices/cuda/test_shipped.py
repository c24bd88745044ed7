"""The model inside the package on `--device interpreter`: requests of all kinds at once, and every way to run them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

from quire import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from quire.engine.directory import ASSETS, SHIPPED_MODEL
from tests.adapter_files import write_adapter
from tests.devices.cuda.test_engine import shown

MODEL = ASSETS / SHIPPED_MODEL
STORY = "Once upon a time there was a little girl who lived in a house near the forest with her dog"
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
SEEDED = SamplingParams(seed=5, top_p=0.9, max_tokens=3, ignore_eos=True)
GRAMMAR = StructuredOutputsParams(choice=["yes", "no"])
REQUESTS: list[tuple[str, SamplingParams, bool]] = [
    (STORY, GREEDY, False),
    (STORY + " and", SEEDED, False),
    ("the dog ran and the dog ran and the dog", GREEDY, False),  # for drafts
    ("A cat", SamplingParams(seed=2, n=2, top_k=9, max_tokens=3), False),
    ("Is it?", SamplingParams(seed=3, max_tokens=6, structured_outputs=GRAMMAR), False),
    (STORY, GREEDY, True),
    ("One day", SamplingParams(seed=4, max_tokens=3, presence_penalty=0.5), True),
    *((f"{name} went to", GREEDY if name < "L" else SEEDED, False) for name in ("Tim", "Lily", "Ben", "Mia", "Tom")),
    *((f"The {name} said", GREEDY, name == "bird") for name in ("bird", "fish", "cow", "king")),
]  # fmt: skip
OPTIONS: dict[str, Any] = {
    "max_model_len": 96, "num_gpu_blocks_override": 80, "block_size": 16, "max_num_seqs": 20,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2},
}  # fmt: skip


@pytest.mark.slow
def test_sixteen_requests_of_all_kinds_get_the_cpu_s_tokens(tmp_path: Path) -> None:
    adapter = LoRARequest("more", 1, write_adapter(tmp_path, MODEL, 1, only="q_proj|v_proj"))
    found = []
    for device in ("interpreter", "cpu"):
        with LLM(device=device, dtype="float32", enable_lora=True, max_lora_rank=8, **OPTIONS) as llm:
            every = [
                llm.submit(prompt, params, lora_request=adapter if adapted else None)
                for prompt, params, adapted in REQUESTS
            ]
            doomed = llm.submit(STORY, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
            outputs = [one.result(300) for one in every]
            doomed.abort()
            again = llm.submit(STORY + " and her", GREEDY).result(300)  # its prefix is cached
            cut = doomed.result(60).outputs[0].token_ids
        assert again.num_cached_tokens
        found.append([[[*sample.token_ids] for sample in output.outputs] for output in (*outputs, again)])
        found[-1].append([[*cut][:3]])
    assert len(REQUESTS) == 16
    assert found[0] == found[1]
    assert found[0][0] != found[0][5], "the adapter changes nothing"


@pytest.mark.slow
def test_a_request_s_bits_follow_nothing_else() -> None:
    """Alone, in a batch, in chunks, preempted and after a restart: log-probabilities to their last bit."""
    picked = [REQUESTS[i] for i in (1, 3, 4)]

    def answers(requests: list[Any], **options: Any) -> list[Any]:
        given = {"device": "interpreter", "dtype": "bfloat16", "kv_cache_dtype": "fp8", **OPTIONS, **options}
        with LLM(**given) as llm:
            params = [params.clone() for _, params, _ in requests]
            for one in params:
                one.logprobs = 2
            outputs = llm.generate([prompt for prompt, *_ in requests], params, use_tqdm=False)
        return [
            [([*one.token_ids], one.finish_reason, shown(one.logprobs)) for one in output.outputs]
            for output in outputs
        ]

    together = answers(picked)
    assert answers(picked[:1]) == together[:1]  # alone, and after a restart
    assert answers(picked, max_num_batched_tokens=24, enable_prefix_caching=False) == together  # in chunks
    assert answers(picked, num_gpu_blocks_override=6, max_num_seqs=4) == together  # preempted
