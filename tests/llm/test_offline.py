"""vLLM's offline API: its signatures, and the flows of its own tests of `LLM`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import quire
from quire import LLM, AsyncLLM, PoolingParams, QuireError, RequestError, SamplingParams
from quire.client.logprobs import FlatLogprobs
from quire.client.outputs import CompletionOutput, RequestOutput
from quire.llm.chats import ChatMethods
from quire.llm.metrics import Counter, Gauge, Histogram
from quire.llm.operator_methods import OperatorMethods
from quire.llm.pooling import PoolingMethods
from quire.llm.programs import ProgramMethods
from quire.params import BeamRules, StructuredOutputsParams
from tests.shared import REFERENCE, require
from tests.tiny import EOS

NAMES = REFERENCE / "vllm-0.32-names.txt"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
# Methods of vLLM's that belong to other kinds of engine: several ranks, training loops.
_ELSEWHERE = (
    "notify_kv_transfer_request_rejected get_num_queued_tokens check_admission add_request reset_encoder_cache "
    "checkpoint_prepare checkpoint_restore compute_weight_checksums "
    "collective_rpc wait_for_requests_to_drain scale_elastic_ep handle_fault get_status init_weight_transfer_engine "
    "shutdown_weight_transfer_engine start_weight_update start_draft_weight_update update_weights "
    "finish_weight_update update_weight_version get_weight_version get_kv_event_sources"
)
ELSEWHERE = set(_ELSEWHERE.split())


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[..., str]) -> LLM:
    return LLM(tiny_model(), max_model_len=128, max_num_seqs=8)


def reference() -> dict[str, list[str]]:
    """The lines of each class in the list of vLLM's names."""
    sections = require(NAMES).read_text().split("\n## ")
    return {part.split(maxsplit=1)[0]: part.splitlines()[1:] for part in sections[1:]}


def methods(lines: list[str]) -> dict[str, list[str]]:
    found = {}
    for line in lines:
        name, bracket, rest = line.strip().partition(" ( ")
        if bracket and not name.startswith("__"):
            found[name] = [p for p in rest.rstrip(" )").replace(" ", "").split(",") if p and p != "cls"]
    return found


@pytest.mark.parametrize("section", ["LLM", "PoolingOfflineMixin", "BeamSearchOfflineMixin", "AsyncLLM"])
def test_methods_take_vllms_arguments_in_its_order(section: str) -> None:
    ours = AsyncLLM if section == "AsyncLLM" else LLM
    for name, wanted in methods(reference()[section]).items():
        if section == "AsyncLLM" and name in ELSEWHERE:
            continue
        assert hasattr(ours, name), name
        found = getattr(ours, name)
        if isinstance(found, property) or name == "from_vllm_config":
            continue
        named = [p for p in inspect.signature(found).parameters if p not in ("self", "ignored")]
        common = [p for p in wanted if p in named]
        assert [p for p in named if p in common] == common, name
        absent = set(wanted) - set(named)
        kwargs = inspect.Parameter.VAR_KEYWORD in [
            p.kind for p in inspect.signature(found).parameters.values()
        ]
        assert not absent or kwargs, f"{name} lacks {absent}"


@pytest.mark.parametrize("kind", [SamplingParams, PoolingParams])
def test_parameters_have_vllms_fields_in_its_order(kind: Any) -> None:
    line = next(line for line in reference()[kind.__name__] if line.strip().startswith("fields:"))
    theirs = [name for name in line.partition(":")[2].replace(" ", "").split(",") if not name.startswith("_")]
    theirs = [name for name in theirs if name != "output_text_buffer_length"]  # internal there
    ours = kind.__struct_fields__
    assert [name for name in ours if name in theirs] == theirs
    assert list(ours[: len(theirs)]) == theirs


@pytest.mark.parametrize("kind", [RequestOutput, CompletionOutput])
def test_outputs_have_vllms_fields(kind: Any) -> None:
    elsewhere = {"routed_experts", "sampling_mask", "spec_decode_metrics", "weight_versions", "outputs"}
    lines = reference()[kind.__name__]
    text = next(line for line in lines if "fields:" in line or "__init__" in line)
    wanted = text.replace("fields:", "").replace("__init__", "").strip(" ()").replace(" ", "").split(",")
    assert all(hasattr(kind, name) or name in elsewhere | set(kind.__dataclass_fields__) for name in wanted)


def test_positional_use(llm: LLM) -> None:
    assert SamplingParams(2, 0.1, 0.2, 1.1, 0.5) == SamplingParams(
        n=2, presence_penalty=0.1, frequency_penalty=0.2, repetition_penalty=1.1, temperature=0.5
    )
    (output,) = llm.generate("abc", GREEDY, False)
    params = SamplingParams.from_optional(temperature=0, max_tokens=8, ignore_eos=True, top_p=None, seed=-1)
    assert params == GREEDY
    assert llm.generate("abc", params, False)[0].outputs == output.outputs
    biased = SamplingParams.from_optional(logit_bias={"7": 300})
    assert biased.logit_bias == {7: 100.0}
    copy = biased.clone()
    copy.max_tokens = 3
    copy.logit_bias[8] = 1.0  # type: ignore[index]
    assert (biased.max_tokens, biased.logit_bias) == (16, {7: 100.0})
    params.max_tokens = 0
    with pytest.raises(RequestError, match="max_tokens must be"):
        llm.generate("abc", params)
    with pytest.raises(RequestError, match="watermarking is not supported"):
        SamplingParams(watermarking=True)


def test_default_parameters_can_be_changed(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    params.max_tokens, params.temperature, params.ignore_eos = 3, 0.0, True
    assert len(llm.generate("abc", params)[0].outputs[0].token_ids) == 3


def test_enqueue_and_wait(llm: LLM) -> None:
    prompts = ["abc", "hello", "x"]
    wanted = [output.outputs for output in llm.generate(prompts, GREEDY)]
    first = llm.enqueue(prompts[:2], GREEDY)
    second = llm.enqueue(prompts[2], GREEDY, use_tqdm=False)
    talk = [{"role": "user", "content": "hi"}]
    third = llm.enqueue_chat(talk, GREEDY)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == first + second + third
    assert [output.outputs for output in outputs[:3]] == wanted
    assert outputs[3].outputs == llm.chat(talk, GREEDY)[0].outputs
    assert llm.wait_for_completion() == []


def test_chat_takes_a_template_and_a_content_format(llm: LLM) -> None:
    talk = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (output,) = llm.chat(talk, GREEDY, chat_template=template)
    assert output.prompt == "<user>hi"
    (output,) = llm.chat(talk, GREEDY, chat_template=template, chat_template_content_format="openai")
    assert output.prompt is not None
    assert "'type': 'text'" in output.prompt
    with pytest.raises(RequestError, match="chat_template_content_format must be one of"):
        llm.chat(talk, GREEDY, chat_template_content_format="xml")
    both = llm.chat([talk, talk], GREEDY, priority=[1, 0])
    assert both[0].outputs == both[1].outputs


def test_tokenization_is_an_option(llm: LLM) -> None:
    (output,) = llm.generate("abcdef", GREEDY, tokenization_kwargs={"truncate_prompt_tokens": 3})
    assert output.prompt_token_ids == llm._front.encode("def")
    with pytest.raises(RequestError, match="padding is not supported"):
        llm.generate("abcdef", GREEDY, tokenization_kwargs={"padding": True})
    with pytest.raises(RequestError, match="lora_request"):
        llm.generate("abcdef", GREEDY, lora_request=object())


def test_a_bar_of_the_callers_counts_requests(llm: LLM) -> None:
    made: list[Any] = []

    class Bar:
        def __init__(self, total: int, desc: str) -> None:
            self.total, self.count, self.closed = total, 0, False
            made.append(self)

        def update(self, n: int) -> None:
            self.count += n

        def close(self) -> None:
            self.closed = True

    llm.generate(["a", "b", "c"], GREEDY, use_tqdm=Bar)
    (bar,) = made
    assert (bar.total, bar.count, bar.closed) == (3, 3, True)


def test_streams_report_every_n_tokens(llm: LLM) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, "logprobs": 2}
    plain = list(llm.stream("abc", SamplingParams(**options)))
    every = list(llm.stream("abc", SamplingParams(**options, stream_interval=5)))
    assert [len(output.outputs[0].token_ids) for output in every[-1:]] == [20]
    assert every[-1].outputs == plain[-1].outputs
    assert len(plain) == 20
    assert len(every) == 5  # 1, 6, 11, 16 and 20 tokens
    stop = plain[-1].outputs[0].text[6:8]
    one, five = (
        llm.generate("abc", SamplingParams(**options, stop=stop, stream_interval=n))[0].outputs
        for n in (1, 5)
    )
    assert one == five


def test_streams_report_the_progress_of_a_long_prompt(tiny_model: Callable[..., str]) -> None:
    with LLM(tiny_model(), max_model_len=256, max_num_batched_tokens=32) as llm:
        prompt, options = {"prompt_token_ids": [5, 6, 7] * 50}, {"temperature": 0, "max_tokens": 4}
        plain = [
            output.outputs[0].token_ids.copy() for output in llm.stream(prompt, SamplingParams(**options))
        ]
        llm.reset_prefix_cache()
        told, tokens = [], []
        for output in llm.stream(prompt, SamplingParams(**options, return_progress=True)):
            if output.outputs[0].token_ids:
                tokens.append(output.outputs[0].token_ids.copy())
            else:
                told.append(output.num_computed_tokens)
        assert told == [32, 64, 96, 128]
        assert tokens == plain
        beams = SamplingParams(beam=BeamRules(beam_width=2), n=2, max_tokens=4, return_progress=True)
        choice = {"structured_outputs": StructuredOutputsParams(choice=["a", "b"], select=True)}
        for params in (
            beams,
            SamplingParams(n=2, return_progress=True),
            SamplingParams(**choice, return_progress=True),
        ):
            llm.reset_prefix_cache()
            assert all(sample.finished for sample in llm.generate(prompt, params)[0].outputs)


def test_flat_logprobs_read_like_the_others(llm: LLM) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": 3}
    (plain,) = llm.generate("abc", SamplingParams(**options))
    (flat,) = llm.generate("abc", SamplingParams(**options, flat_logprobs=True))
    found = flat.outputs[0].logprobs
    assert isinstance(found, FlatLogprobs)
    assert list(found) == plain.outputs[0].logprobs
    assert list(found[2:4]) == (plain.outputs[0].logprobs or [])[2:4]
    assert len(found.token_ids) == found.end_indices[-1]


def test_the_prefix_cache_may_be_passed_by(llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(30, 60))}
    llm.generate(prompt, GREEDY)
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 29
    fresh = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, skip_reading_prefix_cache=True)
    assert llm.generate(prompt, fresh)[0].num_cached_tokens == 0
    assert llm.generate({**prompt, "cache_salt": "a"}, GREEDY)[0].num_cached_tokens == 0


def test_metrics_count_what_ran(tiny_model: Callable[..., str]) -> None:
    llm = LLM(tiny_model(), max_model_len=64)
    (output, _) = llm.generate(["abc", "hello"], GREEDY)
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    generated, running = metrics["vllm:generation_tokens"], metrics["vllm:num_requests_running"]
    assert isinstance(generated, Counter)
    assert isinstance(running, Gauge)
    assert (generated.value, running.value) == (16, 0)
    latency = metrics["vllm:e2e_request_latency_seconds"]
    assert isinstance(latency, Histogram)
    assert latency.count == latency.buckets["+Inf"] == 2
    assert latency.sum > 0
    assert {m.labels["finished_reason"]: m.value for m in llm.get_metrics() if isinstance(m, Counter)
            and m.name == "vllm:request_success"}["length"] == 2  # fmt: skip
    times = output.metrics
    assert times is not None
    assert times.queued_ts <= times.scheduled_ts <= times.first_token_ts <= times.last_token_ts
    assert (times.num_generation_tokens, times.first_token_latency > 0) == (8, True)


def test_small_things_have_answers(llm: LLM) -> None:
    assert llm.get_world_size() == 1
    llm.reset_mm_cache()
    assert llm.reset_prefix_cache()
    for refused in (
        lambda: llm.collective_rpc("x"),
        lambda: llm.apply_model(len),
    ):
        with pytest.raises(QuireError, match="is not supported"):
            refused()
    assert all(hasattr(quire, name) for name in quire.__all__)
    bare = LLM(llm.config.model.model, skip_tokenizer_init=True, max_model_len=64)
    (output,) = bare.generate(
        {"prompt_token_ids": [5, 6]}, SamplingParams(max_tokens=2, logit_bias={EOS: -100})
    )
    assert (len(output.outputs[0].token_ids), output.outputs[0].text) == (2, "")
    with pytest.raises(RequestError, match="this engine has no tokenizer: pass token ids"):
        bare.generate("abc")


@pytest.mark.parametrize("kind", [ChatMethods, OperatorMethods, PoolingMethods, ProgramMethods])
def test_the_class_has_every_method_of_the_bases_that_are_imported_later(kind: type) -> None:
    """Each is that of its module, with its signature and docstring."""
    methods = {name: method for name, method in vars(kind).items() if callable(method)}
    assert methods
    assert {name: getattr(LLM, name, None) for name in methods} == methods
