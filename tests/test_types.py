"""Sampling parameters are checked when they are made, and requests cross a process border unchanged."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import RequestError
from quire.params import OutputKind, SamplingParams
from quire.types import Delta, FinishReason, Request, TokenLogprobs, Usage

BAD: list[tuple[str, Any]] = [
    ("n", 0),
    ("n", 1.5),
    ("n", True),
    ("n", 10_000),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -3),
    ("frequency_penalty", "1"),
    ("repetition_penalty", 0),
    ("repetition_penalty", float("nan")),
    ("temperature", -0.1),
    ("temperature", float("inf")),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 0.5),
    ("min_p", 2),
    ("seed", "7"),
    ("stop", [""]),
    ("stop", 3),
    ("stop", [str(i) for i in range(1000)]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["a"]),
    ("bad_words", [None]),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", 2.0),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("logprobs", -2),
    ("prompt_logprobs", "all"),
    ("logit_bias", {1: 200.0}),
    ("logit_bias", {-1: 1.0}),
    ("allowed_token_ids", []),
    ("ignore_eos", 1),
    ("detokenize", None),
    ("output_kind", "all"),
    ("output_kind", 1),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_values_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_an_output_kind_may_be_its_name() -> None:
    assert SamplingParams(output_kind="delta").output_kind is OutputKind.DELTA  # type: ignore[arg-type]


def test_contradictions_and_unknown_names_are_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens"):
        SamplingParams(min_tokens=9, max_tokens=8)
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)
    with pytest.raises(TypeError, match="best_off"):
        SamplingParams(best_off=3)  # type: ignore[call-arg]


def test_values_are_brought_to_one_form() -> None:
    params = SamplingParams(stop="end", top_k=-1, stop_token_ids=[3], bad_words=None)
    assert (params.stop, params.top_k, params.stop_token_ids, params.bad_words) == (("end",), 0, (3,), ())


@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=1),
    st.integers(0, 2**64 - 1),
    st.floats(0, 2),
    st.lists(st.text(min_size=1), max_size=4),
    st.dictionaries(st.integers(0, 100), st.floats(-100, 100), max_size=3),
)
def test_requests_cross_the_border_unchanged(
    tokens: list[int], seed: int, temperature: float, stop: list[str], bias: dict[int, float]
) -> None:
    params = SamplingParams(temperature=temperature, stop=stop, logit_bias=bias or None, max_tokens=None)
    request = Request(id="é", tokens=tokens, sampling=params, seed=seed, max_tokens=3, eos_token_ids=(2,))
    data = msgspec.msgpack.encode(request)
    assert msgspec.msgpack.decode(data, type=Request) == request


def test_deltas_cross_the_border_unchanged() -> None:
    scores = TokenLogprobs(3, -0.5, 1, [3, 4], [-0.5, -1.5])
    delta = Delta("a", 1, [3], Usage(5, 4, 1), [scores], None, FinishReason.STOP, 3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(delta), type=Delta) == delta


def test_sample_seeds_wrap_around() -> None:
    request = Request(id="a", tokens=[1], sampling=SamplingParams(), seed=2**64 - 1, max_tokens=1)
    assert [request.sample_seed(i) for i in range(3)] == [2**64 - 1, 0, 1]
