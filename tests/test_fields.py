"""Fields of requests: checks and errors follow from annotations, and a field means the same everywhere."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest

from quire import SamplingParams
from quire.errors import RequestError
from quire.fields import check, fields_of, says
from quire.params import BeamRules, PoolingParams, RepetitionDetectionParams
from quire.serve.openai.protocol import SamplingFields
from quire.steps import Gen


class Told(msgspec.Struct):
    """A struct with a field of each kind."""

    share: Annotated[float, says("a share of it", ge=0, le=1)] = 0.5
    above: Annotated[float, says("more than nothing", gt=0)] | None = None
    count: Annotated[int, says("how often", ge=1, le=9)] = 1
    flag: bool | None = None
    word: bool | Literal["never"] = True
    other: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check(self, Told, "told.")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"share": 1.5}, r"^told.share must be a number in \[0, 1\], got 1.5 \(a share of it\)$"),
        ({"share": True}, r"a number in \[0, 1\], got True"),
        ({"share": float("nan")}, "got nan"),
        ({"share": None}, "got None"),
        ({"above": 0}, "a number > 0, or None, got 0"),
        ({"above": float("inf")}, "got inf"),
        ({"count": 10}, r"an integer from 1 to 9, got 10 \(how often\)"),
        ({"count": 2.0}, "got 2.0"),
        ({"count": True}, "got True"),
        ({"flag": 1}, "true or false, or None, got 1"),
        ({"word": "ever"}, "true or false or one of 'never', got 'ever'"),
        ({"count": "x" * 1000}, r"got 'x{79}\.\.\. "),
    ],
)
def test_a_wrong_value_is_refused_by_the_words_of_its_field(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        Told(**given)
    assert caught.value.param == f"told.{next(iter(given))}"


def test_right_values_are_taken() -> None:
    Told(share=1, above=3, count=9, flag=True, word="never", other={"any": "thing"})
    assert Told(flag=None) == Told()
    assert fields_of(Told)["other"].test is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -0.1}, r"temperature must be a number in \[0, 1000000\], got -0.1 \(0 takes the"),
        ({"top_p": 0.0}, "top_p must be a number in"),
        ({"top_k": -2}, "top_k must be an integer >= -1, got -2 .*0 or -1 keeps all"),
        ({"n": 1025}, "n must be an integer from 1 to 1024, got 1025"),
        ({"max_tokens": 0}, "max_tokens must be an integer >= 1, or None"),
        ({"min_tokens": 3, "max_tokens": 2}, r"min_tokens must be at most max_tokens \(2\)"),
        ({"logprobs": -2}, "logprobs must be an integer >= -1, or None"),
        ({"ignore_eos": "no"}, "ignore_eos must be true or false"),
        ({"seed": 1.5}, "seed must be an integer, or None"),
        ({"stop": [str(i) for i in range(257)]}, "stop must be at most 256 entries"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be a list of token ids"),
        ({"logit_bias": {3: 101}}, r"logit_bias must be a map to numbers in \[-100, 100\]"),
        ({"output_kind": "delta-ish"}, "output_kind must be one of cumulative, delta, final_only"),
    ],
)
def test_sampling_parameters_are_checked(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(**given)
    assert caught.value.param in given


def test_other_parameters_are_checked() -> None:
    with pytest.raises(RequestError, match="beam_width must be an integer from 1 to 256"):
        BeamRules(beam_width=0)
    with pytest.raises(RequestError, match=r"repetition_detection\.min_count must be an integer from 0"):
        RepetitionDetectionParams(min_count=-1)
    with pytest.raises(RequestError, match="dimensions must be an integer from 1"):
        PoolingParams(dimensions=0)


def test_a_field_means_the_same_in_bodies_and_in_python() -> None:
    own = {"max_tokens", "structured_outputs", "logit_bias", "prediction", "repetition_detection"}
    ours, bodies = fields_of(SamplingParams), fields_of(SamplingFields)
    shared = ours.keys() & bodies.keys() - own
    assert len(shared) > 20
    for name in shared:
        assert bodies[name].sentence == ours[name].sentence != "", name
    assert fields_of(Gen).keys() - ours.keys() == {
        "name",
        "regex",
        "json_schema",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
    }
