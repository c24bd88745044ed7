"""Logits processors of a request and of an engine: what they change, what they leave alone, and what a mistake ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quire import LLM, QuireError, RequestError, SamplingParams, StructuredOutputsParams
from quire.logits_processor import AdapterLogitsProcessor, BatchUpdate, LogitsProcessor
from tests.tiny import VOCAB_SIZE

PLAIN = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(seed=1, max_tokens=12, ignore_eos=True, logprobs=2),
    SamplingParams(seed=2, max_tokens=12, ignore_eos=True, top_k=5, repetition_penalty=1.3),
]
PROMPTS = ["abc", "hello there", "x"]


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[..., str]) -> LLM:
    return LLM(tiny_model(), max_model_len=128, max_num_seqs=8, max_logprobs=-1)


def ban(*banned: int) -> Callable[[list[int], Any], Any]:
    def change(output: list[int], logits: Any) -> Any:
        logits[list(banned)] = -np.inf
        return logits

    return change


def tokens_of(outputs: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("backend", ["auto", "reference", "torch"])
def test_a_function_bans_tokens_and_leaves_others_alone(
    tiny_model: Callable[..., str], backend: str, overlap: bool
) -> None:
    exact = {"backend": backend, "batch_invariant": True}
    llm = LLM(tiny_model(), max_model_len=64, async_scheduling=overlap, **exact)
    alone = llm.generate(PROMPTS, PLAIN, use_tqdm=False)
    banned = alone[0].outputs[0].token_ids[:3]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logits_processors=[ban(*banned)])
    outputs = llm.generate([*PROMPTS, PROMPTS[0]], [*PLAIN, params], use_tqdm=False)
    assert [o.outputs for o in outputs[:3]] == [o.outputs for o in alone]
    changed = outputs[3].outputs[0].token_ids
    assert not set(changed) & set(banned)
    bias = SamplingParams(
        temperature=0,
        max_tokens=12,
        ignore_eos=True,
        allowed_token_ids=[t for t in range(VOCAB_SIZE) if t not in banned],
    )
    assert tokens_of(llm.generate(PROMPTS[0], bias)) == [changed]


def test_a_function_may_read_prompt_and_output(llm: LLM) -> None:
    seen: list[tuple[list[int], list[int]]] = []

    def watch(prompt: list[int], output: list[int], logits: Any) -> Any:
        seen.append((list(prompt), list(output)))
        return logits

    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logits_processors=[watch])
    (output,) = llm.generate("abc", params)
    tokens = output.outputs[0].token_ids
    assert seen == [(output.prompt_token_ids, tokens[:i]) for i in range(5)]
    assert tokens == tokens_of(llm.generate("abc", PLAIN[0]))[0][:5]


def test_an_error_ends_its_request_alone(llm: LLM) -> None:
    def fail(output: list[int], logits: Any) -> Any:
        if len(output) == 3:
            raise KeyError("third")
        return logits

    bad = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logits_processors=[fail])
    wanted = tokens_of(llm.generate(PROMPTS, PLAIN))
    streams = [
        llm.stream(prompt, params) for prompt, params in zip(["q", *PROMPTS], [bad, *PLAIN], strict=True)
    ]
    for stream, tokens in zip(streams[1:], wanted, strict=True):
        assert list(stream)[-1].outputs[0].token_ids == tokens
    with pytest.raises(QuireError, match="a logits processor failed: KeyError: 'third'"):
        list(streams[0])
    for wrong in (lambda output, logits: None, lambda output, logits: logits[:3]):
        with pytest.raises(QuireError, match=r"a logits processor (failed|returned)"):
            llm.generate("q", SamplingParams(logits_processors=[wrong]))
    assert llm.stats().num_used_blocks == 0


def test_raw_logprobs_are_the_models_own(llm: LLM) -> None:
    """vLLM's raw log-probabilities are those before any processor."""
    banned = tokens_of(llm.generate("abc", PLAIN[0]))[0][0]
    params = SamplingParams(
        temperature=0, max_tokens=1, logprobs=1, ignore_eos=True, logits_processors=[ban(banned)]
    )
    (plain,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=1, logprobs=-1, ignore_eos=True))
    (output,) = llm.generate("abc", params)
    (entry,) = output.outputs[0].logprobs or ()
    (whole,) = plain.outputs[0].logprobs or ()
    assert entry[banned].rank == 1
    for token, found in entry.items():
        assert found == whole[token]


class Even(LogitsProcessor):
    """Allows only even tokens to requests that ask for it; counts how it is used."""

    made = 0

    def __init__(self, vllm_config: Any, device: str, is_pin_memory: bool) -> None:
        Even.made += 1
        assert vllm_config.model.max_model_len == 128
        self.output: list[int] = []
        self.live = False

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if not isinstance((sampling_params.extra_args or {}).get("even", True), bool):
            raise ValueError("even must be true or false")

    @classmethod
    def concerns(cls, sampling_params: SamplingParams) -> bool:
        return bool((sampling_params.extra_args or {}).get("even"))

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is not None:
            for _ in batch_update.removed:
                assert self.live
                self.live = False
            for row, params, prompt, output in batch_update.added:
                assert (row, self.live) == (0, False)
                assert params.extra_args
                assert prompt
                self.live, self.output = True, output

    def apply(self, logits: Any) -> Any:
        assert self.live
        assert logits.shape == (1, VOCAB_SIZE)
        if len(self.output) < 4:
            logits[:, 1::2] = -np.inf
        return logits


class Only(AdapterLogitsProcessor):
    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., Any] | None:
        token = (params.extra_args or {}).get("only")
        if token is None:
            return None

        def change(output: list[int], logits: Any) -> Any:
            keep = logits[token].copy()
            logits[:] = -np.inf
            logits[token] = keep
            return logits

        return change


def test_classes_of_the_engine(tiny_model: Callable[..., str]) -> None:
    llm = LLM(tiny_model(), max_model_len=128, max_num_seqs=8, logits_processors=[Even, Only])
    plain = llm.generate(PROMPTS, PLAIN)
    assert Even.made == 0
    even = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, extra_args={"even": True})
    only = SamplingParams(seed=1, max_tokens=3, ignore_eos=True, extra_args={"only": 70})
    outputs = llm.generate([*PROMPTS, "abc", "abd", "z"], [*PLAIN, even, even, only])
    assert [o.outputs for o in outputs[:3]] == [o.outputs for o in plain]
    for output in outputs[3:5]:
        assert all(token % 2 == 0 for token in output.outputs[0].token_ids[:4])
    assert outputs[5].outputs[0].token_ids == [70, 70, 70]
    assert Even.made == 2
    again = llm.generate("abc", even)
    assert tokens_of(again) == tokens_of([outputs[3]])
    assert Even.made == 2, "instances are reused"
    with pytest.raises(RequestError, match="Even: even must be true or false"):
        llm.generate("abc", SamplingParams(extra_args={"even": 3}))


def test_a_grammar_and_a_processor_apply_together(llm: LLM) -> None:
    from_grammar = SamplingParams(
        temperature=0,
        max_tokens=20,
        structured_outputs=StructuredOutputsParams(regex="[0-9]{6}"),
        logits_processors=[ban(*llm._front.encode("13579"))],
    )
    (output,) = llm.generate("abc", from_grammar)
    assert len(output.outputs[0].text) == 6
    assert set(output.outputs[0].text) <= set("02468")


@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits", "raw_logits"])
def test_logprobs_mode(tiny_model: Callable[..., str], llm: LLM, mode: str) -> None:
    other = LLM(tiny_model(), max_model_len=128, logprobs_mode=mode, max_logprobs=-1)
    params = SamplingParams(seed=5, max_tokens=4, top_k=3, temperature=0.5, logprobs=-1, ignore_eos=True)
    (raw,), (output,) = llm.generate("abc", params), other.generate("abc", params)
    assert raw.outputs[0].token_ids == output.outputs[0].token_ids
    for before, after in zip(raw.outputs[0].logprobs or (), output.outputs[0].logprobs or (), strict=True):
        values = np.array([before[t].logprob for t in range(VOCAB_SIZE)])
        found = np.array([after[t].logprob for t in range(VOCAB_SIZE)])
        if mode == "raw_logits":
            np.testing.assert_allclose(found - found.max(), values - values.max(), atol=1e-4)
            continue
        best = np.argsort(-values)[:3]
        assert set(np.flatnonzero(np.isfinite(found))) == set(best)
        scaled = values[best] / 0.5
        if mode == "processed_logprobs":
            scaled -= np.log(np.exp(scaled).sum())
            np.testing.assert_allclose(found[best], scaled, atol=1e-4)
        else:
            np.testing.assert_allclose(found[best] - found[best].max(), scaled - scaled.max(), atol=1e-4)


def test_named_tokens_are_scored(llm: LLM) -> None:
    params = SamplingParams(seed=5, max_tokens=4, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
    (whole,) = llm.generate("abcdef", params)
    named = SamplingParams(
        seed=5, max_tokens=4, ignore_eos=True, logprob_token_ids=[7, 300], prompt_logprob_token_ids=[8]
    )
    (output,) = llm.generate("abcdef", named)
    assert output.prompt_logprobs is None
    for entry, every, token in zip(
        output.outputs[0].logprobs or (),
        whole.outputs[0].logprobs or (),
        output.outputs[0].token_ids,
        strict=True,
    ):
        assert entry == {t: every[t] for t in (token, 7, 300)}
    scored = output.prompt_token_id_logprobs
    assert scored is not None
    assert scored[0] is None
    assert scored[1:] == [{8: every[8]} for every in (whole.prompt_logprobs or ())[1:] if every]
    late = SamplingParams(max_tokens=1, prompt_logprobs=0, prompt_logprob_start=4)
    (output,) = llm.generate("abcdef", late)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[:4] == [None] * 4
    for entry, every in zip(output.prompt_logprobs[4:], (whole.prompt_logprobs or ())[4:], strict=True):
        assert entry
        assert every
        assert entry.items() <= every.items()
    with pytest.raises(RequestError, match="prompt_logprob_start is 6, but the prompt has 6 tokens"):
        llm.generate("abcdef", SamplingParams(prompt_logprobs=0, prompt_logprob_start=6))
    with pytest.raises(RequestError, match="logprob_token_ids: token id 9999 is outside"):
        llm.generate("abcdef", SamplingParams(logprob_token_ids=[9999]))
