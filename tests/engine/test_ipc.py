"""Frames survive the trip, and are refused when they are not frames."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import EngineConfig
from quire.engine import ipc
from quire.engine.verbs import Sleep, WakeUp
from quire.params import SamplingParams
from quire.types import Delta, EngineStats, FinishReason, ModelCard, Request, TokenLogprobs, Usage

REQUEST = Request(
    id="cmpl-é-0",
    tokens=[1, 2, 300_000],
    sampling=SamplingParams(
        n=2, stop=["a", "bc"], seed=-5, logit_bias={7: -1.5}, stop_token_ids=[4], logprobs=3
    ),
    seed=(1 << 64) - 1,
    max_tokens=9,
    eos_token_ids=(2,),
    bad_words_token_ids=((1, 2), (3,)),
    salt="tenant",
    arrival=12.5,
)
SCORES = TokenLogprobs(3, -0.5, 1, [3, 4], [-0.5, -2.0])
DELTA = Delta("r", 1, [3], Usage(4, 0, 1), [SCORES], [SCORES], FinishReason.ERROR, 3, "why")


@pytest.mark.parametrize(
    "command",
    [
        ipc.Submit([REQUEST]),
        ipc.Abort("x"),
        ipc.Abort("x", 3),
        ipc.Stop(),
        ipc.Order(4, Sleep(2, "wait")),
        ipc.Order(5, WakeUp(("weights",))),
    ],
)
def test_commands_return_equal(command: ipc.Command) -> None:
    assert ipc.decode_command(ipc.encode(command)) == command


@pytest.mark.parametrize(
    "event",
    [
        ipc.Loading(1.5),
        ipc.EngineReady(
            ModelCard("m", 8, 16, (1, 2), defaults={"top_k": 5}), {"weights": 1.5}, EngineStats()
        ),
        ipc.Updates(
            [DELTA], [ipc.Scheduled("r", 0, 2.5)], EngineStats(num_running=3), [ipc.StepTime(0.5, 0.25)]
        ),
        ipc.Reply(1, EngineStats(), "no"),
        ipc.EngineFailed("ModelError", "no weights"),
    ],
)
def test_events_return_equal(event: ipc.Event) -> None:
    assert ipc.decode_event(ipc.encode(event)) == event


def test_launch_carries_the_whole_configuration() -> None:
    config = EngineConfig.from_options(model="m", block_size=32, seed=3, max_model_len=100)
    launch = ipc.decode_launch(ipc.encode(ipc.Launch(7, "maker", config)))
    assert launch.config == config


@given(st.binary(max_size=200))
def test_bytes_that_are_no_frame_are_refused(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        ipc.decode_command(b"\xc1" + data)


def test_the_lists_of_a_call_cross_once() -> None:
    sampling = SamplingParams(n=4, allowed_token_ids=list(range(1000, 51_000)), logit_bias={5: 1.0})
    shared = {"sampling": sampling, "bad_words_token_ids": ((1, 2), (3,)), "prediction": (4,) * 1000}
    calls = [msgspec.structs.replace(REQUEST, id=f"r{i}", tokens=[i], **shared) for i in range(1024)]
    one, all_of_them = (ipc.encode(ipc.Submit.of(requests)) for requests in (calls[:1], calls))
    assert len(all_of_them) < 2 * len(one)
    command = ipc.decode_command(all_of_them)
    assert isinstance(command, ipc.Submit)
    assert command.whole == calls
    assert all(request.sampling is command.requests[0].sampling for request in command.whole)


def test_requests_that_differ_cross_as_they_are() -> None:
    others = [msgspec.structs.replace(REQUEST, id="b", sampling=SamplingParams(top_k=i)) for i in range(3)]
    command = ipc.decode_command(ipc.encode(ipc.Submit.of([REQUEST, *others])))
    assert isinstance(command, ipc.Submit)
    assert command.whole == [REQUEST, *others]
