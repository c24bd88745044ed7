"""An LLM ends when its last name goes: its thread, its cache and its weights, without a call of shutdown."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import pytest

from quire import LLM, SamplingParams
from quire.params import StructuredOutputsParams

PLAIN = SamplingParams(max_tokens=3)
GUIDED = SamplingParams(max_tokens=3, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))


def engines() -> int:
    return sum(thread.name == "quire-engine" for thread in threading.enumerate())


@pytest.mark.parametrize("params", [None, PLAIN, GUIDED], ids=["no call", "a call", "a constraint"])
def test_an_llm_without_a_name_is_freed(
    tiny_model: Callable[..., str], params: SamplingParams | None
) -> None:
    before = engines()
    llm = LLM(tiny_model(), max_model_len=64, threads=1)
    if params is not None:
        llm.generate("hello", params, use_tqdm=False)
    core = weakref.ref(llm._core)
    gc.disable()  # memory must not wait for the collector, which does not see how much it is
    try:
        del llm
        assert engines() == before
        assert core() is None
    finally:
        gc.enable()


def test_a_stream_that_is_left_open_keeps_nothing(tiny_model: Callable[..., str]) -> None:
    before = engines()
    llm = LLM(tiny_model(), max_model_len=64, threads=1)
    stream = llm.stream("hello", PLAIN)
    next(stream)
    del llm, stream
    gc.collect()
    assert engines() == before
