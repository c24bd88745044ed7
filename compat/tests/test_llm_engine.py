"""`LLMEngine`: requests that come between steps are answered as `LLM` answers them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire import SamplingParams, StructuredOutputsParams
from quire.errors import EngineError, RequestError
from quire.params import GuidedDecodingParams, OutputKind
from vllm import EngineArgs, LLMEngine

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    with LLMEngine.from_engine_args(EngineArgs()) as made:
        yield made


def test_steps_report_what_llm_returns(engine: LLMEngine) -> None:
    prompts = {"a": "Once upon a time", "b": "One day", "c": "The little dog"}
    waiting, texts = dict(prompts), dict[str, str]()
    while waiting or engine.has_unfinished_requests():
        if waiting:
            name, prompt = waiting.popitem()
            assert engine.add_request(name, prompt, GREEDY) == name
        for output in engine.step():
            assert output.prompt == prompts[output.request_id]
            texts[output.request_id] = output.outputs[0].text
    alone = engine.generate(list(prompts.values()), GREEDY, use_tqdm=False)
    assert [texts[name] for name in prompts] == [output.outputs[0].text for output in alone]
    assert engine.step() == []
    assert engine.get_num_unfinished_requests() == 0


@pytest.mark.parametrize("kind", list(OutputKind))
def test_outputs_are_reported_as_their_kind_says(engine: LLMEngine, kind: OutputKind) -> None:
    (whole,) = engine.generate("One day", GREEDY, use_tqdm=False)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, output_kind=kind)
    engine.add_request("x", "One day", params)
    seen = []
    while engine.has_unfinished_requests():
        seen += [output.outputs[0].text for output in engine.step()]
    text = whole.outputs[0].text
    assert "".join(seen) == text if kind is OutputKind.DELTA else seen[-1] == text
    assert len(seen) == 1 or kind is not OutputKind.FINAL_ONLY


def test_a_request_can_be_ended(engine: LLMEngine) -> None:
    engine.add_request("long", "Once", SamplingParams(max_tokens=900, ignore_eos=True, n=2))
    with pytest.raises(RequestError, match="belongs to an unfinished request"):
        engine.add_request("long", "Once", GREEDY)
    engine.step()
    engine.abort_request(["long", "unknown"])
    last = [output for _ in range(200) if engine.has_unfinished_requests() for output in engine.step()][-1]
    assert [sample.finish_reason for sample in last.outputs] == ["abort", "abort"]
    assert not engine.has_unfinished_requests()


def test_an_engine_that_was_shut_down_says_so() -> None:
    engine = LLMEngine()
    engine.add_request("x", "Once", SamplingParams(max_tokens=900, ignore_eos=True))
    engine.shutdown()
    with pytest.raises(EngineError, match="shut down"):
        [engine.step() for _ in range(1000)]


def test_older_names_of_constraints_work(engine: LLMEngine) -> None:
    older = SamplingParams(guided_decoding=GuidedDecodingParams(choice=["red", "blue"], backend="xgrammar"))
    assert older == SamplingParams(structured_outputs=StructuredOutputsParams(choice=["red", "blue"]))
    (output,) = engine.generate("The sky is", older, use_tqdm=False)
    assert output.outputs[0].text in ("red", "blue")
    with pytest.raises(RequestError, match="not both"):
        SamplingParams(
            guided_decoding=GuidedDecodingParams(regex="a"),
            structured_outputs=StructuredOutputsParams(regex="b"),
        )
