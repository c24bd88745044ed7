"""`LLM` as a user meets it: every form of prompt, results with vLLM's names, and errors that say what to change."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, QuireError, RequestError, SamplingParams
from quire.errors import ConfigError, ModelError
from quire.params import OutputKind
from tests.tiny import EOS, VOCAB_SIZE, write_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[..., str]) -> LLM:
    return LLM(tiny_model(), max_model_len=128, max_num_seqs=8)


def test_every_form_of_prompt(llm: LLM) -> None:
    text = llm.generate("abc", GREEDY)
    tokens = llm.generate([97, 98, 99], GREEDY)
    many = llm.generate(["abc", {"prompt": "abc"}, {"prompt_token_ids": llm._front.encode("abc")}], GREEDY)
    wanted = text[0].outputs[0].token_ids
    assert [o.outputs[0].token_ids for o in many] == [wanted] * 3
    assert len(tokens) == 1
    assert len(tokens[0].outputs[0].token_ids) == 8
    assert llm.generate([], GREEDY) == []


def test_result_names_are_vllms(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (output,) = llm.generate("hello", params)
    sample = output.outputs[0]
    assert (output.prompt, output.finished, output.error) == ("hello", True, None)
    assert len(output.prompt_token_ids) == 5
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == 5
    assert sample.logprobs is not None
    assert len(sample.logprobs) == 4
    best = sample.logprobs[0][sample.token_ids[0]]
    assert best.rank == 1
    assert sample.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for entry, token in zip(sample.logprobs, sample.token_ids, strict=True))
    )
    assert (sample.index, sample.finish_reason, sample.stop_reason) == (0, "length", None)


def test_parameters_may_differ_by_prompt(llm: LLM) -> None:
    each = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 2, 3)]
    outputs = llm.generate(["a", "b", "c"], each)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 2, 3]
    with pytest.raises(RequestError, match="3 prompts need as many"):
        llm.generate(["a", "b", "c"], each[:2])


def test_chat_goes_through_the_template(llm: LLM) -> None:
    talk = [{"role": "user", "content": "hi"}]
    (answer,) = llm.chat(talk, GREEDY)
    assert answer.prompt == "<|user|>hi<|end|><|assistant|>"
    both = llm.chat([talk, talk], GREEDY)
    assert [b.outputs[0].token_ids for b in both] == [answer.outputs[0].token_ids] * 2
    (streamed,) = list(llm.stream_chat(talk, GREEDY))[-1:]
    assert streamed.outputs[0].token_ids == answer.outputs[0].token_ids


def test_a_stop_string_ends_the_sample_and_is_cut(llm: LLM) -> None:
    whole = (
        llm.generate("abc", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))[0].outputs[0].text
    )
    stop = whole[5:7]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=stop)
    (sample,) = llm.generate("abc", params)[0].outputs
    assert sample.text == whole[: whole.index(stop)]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
    assert llm.stats().num_used_blocks == 0


def test_an_eos_token_ends_the_sample_and_is_not_text(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, logit_bias={EOS: 100.0}, min_tokens=3)
    (sample,) = llm.generate("abc", params)[0].outputs
    assert sample.token_ids[-1] == EOS
    assert len(sample.token_ids) == 4
    assert "<eos>" not in sample.text
    assert (sample.finish_reason, sample.stop_reason) == ("stop", None)


def test_a_stop_token_is_named(llm: LLM) -> None:
    params = SamplingParams(max_tokens=9, allowed_token_ids=[70], stop_token_ids=[70])
    (sample,) = llm.generate("abc", params)[0].outputs
    assert (sample.token_ids, sample.finish_reason, sample.stop_reason) == ([70], "stop", 70)


def test_streaming_equals_generating(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, seed=4, n=2, logprobs=2, prompt_logprobs=1)
    (whole,) = llm.generate("Once upon", params)
    steps = list(llm.stream("Once upon", params))
    assert steps[-1].outputs == whole.outputs
    assert steps[-1].prompt_logprobs == whole.prompt_logprobs
    assert whole.metrics is not None
    assert whole.metrics.first_token_time is not None
    assert whole.metrics.finished_time is not None
    assert whole.metrics.first_token_time < whole.metrics.finished_time


def test_a_stream_yields_what_output_kind_says(llm: LLM) -> None:
    options: dict[str, Any] = {"max_tokens": 20, "seed": 4, "n": 2, "logprobs": 1}
    (whole,) = llm.generate("Once upon", SamplingParams(**options))
    (end,) = llm.stream("Once upon", SamplingParams(**options, output_kind=OutputKind.FINAL_ONLY))
    assert end.outputs == whole.outputs
    parts = list(llm.stream("Once upon", SamplingParams(**options, output_kind=OutputKind.DELTA)))
    for i, sample in enumerate(whole.outputs):
        news = [part.outputs[i] for part in parts]
        assert len(news) > 10
        assert "".join(new.text for new in news) == sample.text
        assert [token for new in news for token in new.token_ids] == sample.token_ids
        assert [entry for new in news for entry in new.logprobs or ()] == sample.logprobs
        assert news[-1].finish_reason == sample.finish_reason


def test_a_stream_that_is_left_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream("abc", SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert llm.stats().num_used_blocks == 0
    assert llm.stats().num_running == 0


def test_cached_tokens_are_counted(tiny_model: Callable[..., str]) -> None:
    llm = LLM(tiny_model(), max_model_len=128)
    prompt = {"prompt_token_ids": list(range(50))}
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 49
    llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0


def test_max_tokens_is_cut_to_the_models_length(llm: LLM) -> None:
    (sample,) = llm.generate({"prompt_token_ids": [1] * 120}, SamplingParams(max_tokens=50, ignore_eos=True))[
        0
    ].outputs
    assert len(sample.token_ids) == 8
    assert sample.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", GREEDY, "prompt is empty"),
        ({"prompt_token_ids": []}, GREEDY, "prompt is empty"),
        ({"prompt_token_ids": [VOCAB_SIZE]}, GREEDY, "outside the vocabulary"),
        ({"prompt_token_ids": [-1]}, GREEDY, "outside the vocabulary"),
        ({"prompt_token_ids": [1] * 128}, GREEDY, "maximum context length is 128"),
        ({"prompt": "a", "image": "b"}, GREEDY, "prompt may contain"),
        ("\ud800", GREEDY, "UTF-8|surrogate|Unicode"),
        ("a", SamplingParams(logprobs=21), "--max-logprobs"),
        ("a", SamplingParams(prompt_logprobs=-1), "--max-logprobs"),
        ("a", SamplingParams(stop_token_ids=[VOCAB_SIZE]), "stop_token_ids"),
        ("a", SamplingParams(allowed_token_ids=[VOCAB_SIZE]), "allowed_token_ids"),
        ("a", SamplingParams(logit_bias={VOCAB_SIZE: 1.0}), "logit_bias"),
    ],
)
def test_bad_requests_say_what_to_change(
    llm: LLM, prompt: object, params: SamplingParams, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, params)  # type: ignore[arg-type]
    assert llm.stats().num_waiting == 0


def test_a_full_context_advises_only_what_helps(tiny_model: Callable[..., str]) -> None:
    path = tiny_model()
    for given, grows in ((64, True), (None, False)):
        with LLM(path, max_model_len=given) as llm:
            with pytest.raises(RequestError, match="maximum context length is") as refused:
                llm.generate({"prompt_token_ids": [1] * llm.max_model_len}, GREEDY)
            assert ("--max-model-len" in str(refused.value)) is grows
            assert "shorten it" in str(refused.value)


def test_a_failing_row_ends_its_request_with_the_reason(tiny_model: Callable[..., str]) -> None:
    llm = LLM(tiny_model(), max_model_len=128)
    short = SamplingParams(max_tokens=1)
    (only,) = llm._front.encode("A")
    stuck = SamplingParams(
        max_tokens=3, allowed_token_ids=[only], bad_words=["AA"]
    )  # fails at its second token
    streams = list(llm._streams(["a", "b", "c"], [short, stuck, GREEDY], None))
    with pytest.raises(QuireError, match="request 1 failed: every token is forbidden"):
        llm._run(streams, False)
    assert streams[1].output.outputs[0].token_ids == [only]
    assert streams[0].output.error is None
    assert llm.stats().num_used_blocks == 0
    assert llm.generate("a", GREEDY)[0].finished


def test_bad_engines_are_refused(tiny_model: Callable[..., str], tmp_path: Path) -> None:
    model = tiny_model()
    with pytest.raises(ConfigError, match="unknown option: max_sequences"):
        LLM(model, max_sequences=3)
    with pytest.raises(ConfigError, match="positions the model was made for"):
        LLM(model, max_model_len=100_000)
    with pytest.raises(ConfigError, match="max_model_len = 128"):
        LLM(model, max_model_len=128, num_gpu_blocks_override=2)
    with pytest.raises(ModelError, match="neither an existing directory"):
        LLM(str(tmp_path / "nowhere"))
    broken = write_checkpoint(tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "architectures": ["WonderForCausalLM"]}))
    with pytest.raises(ModelError, match="WonderForCausalLM"):
        LLM(str(broken))


def test_model_defaults_come_from_its_generation_config(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model")
    (path / "generation_config.json").write_text(
        json.dumps({"temperature": 0.3, "top_k": 5, "eos_token_id": [3, 4]})
    )
    params = LLM(str(path)).get_default_sampling_params()
    assert (params.temperature, params.top_k) == (0.3, 5)
    plain = LLM(str(path), generation_config="vllm").get_default_sampling_params()
    assert (plain.temperature, plain.top_k) == (1.0, 0)


def test_without_a_tokenizer(tiny_model: Callable[..., str]) -> None:
    llm = LLM(tiny_model(), skip_tokenizer_init=True, max_model_len=128)
    assert llm.get_tokenizer() is None
    assert llm.generate({"prompt_token_ids": [1, 2]}, GREEDY)[0].outputs[0].text == ""
    with pytest.raises(RequestError, match="pass token ids"):
        llm.generate("text", GREEDY)


def test_real_checkpoint_gives_its_golden_tokens(data: Path) -> None:
    golden = json.loads((data / "ckpt-stories260K" / "golden_greedy_256.json").read_text())
    llm = LLM(str(data / "ckpt-stories260K" / "hf"))
    params = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": golden["prompt_ids"]}, params)
    assert output.outputs[0].token_ids == golden["greedy_ids"][:256]
