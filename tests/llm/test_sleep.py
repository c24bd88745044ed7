"""Sleeping gives memory back, and waking up answers as before."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire import LLM, QuireError, SamplingParams
from quire.errors import EngineError
from quire.types import Delta
from tests.waiting import wait_until

MIB = 1 << 20
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = ["abc", "hello", "a longer prompt than the others"]
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[..., str]) -> Iterator[LLM]:
    """58 MiB of weights and a KV cache of 100 MiB."""
    config = Path(tiny_model()) / "config.json"
    big = config.parent.parent / "big"
    big.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (big / name).write_bytes((config.parent / name).read_bytes())
    (big / "config.json").write_text(json.dumps({**json.loads(config.read_text()), **SIZES}))
    with LLM(str(big), load_format="dummy", max_model_len=512, kv_cache_memory_bytes=100 * MIB) as llm:
        yield llm


def memory() -> float:
    gc.collect()
    return psutil.Process().memory_info().rss / MIB


@pytest.mark.parametrize("level", [1, 2])
def test_memory_comes_back_and_answers_stay(llm: LLM, level: int) -> None:
    wanted = [output.outputs for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    llm.generate([{"prompt_token_ids": [i] * 450} for i in range(3)], GREEDY, use_tqdm=False)  # fill pages
    before = memory()
    llm.sleep(level)
    freed = before - memory()
    print(f"level {level}: {freed:.0f} MiB of {before:.0f} MiB")
    assert llm.is_sleeping()
    assert freed > (100 if level == 2 else 50)
    with pytest.raises(EngineError, match="the engine sleeps: call wake_up first"):
        llm.generate("abc", GREEDY)
    if level == 2:
        llm.wake_up(["weights"])
        assert llm.is_sleeping()
        llm.wake_up(["kv_cache"])
    else:
        llm.wake_up()
    assert not llm.is_sleeping()
    again = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.outputs for output in again] == wanted
    assert all(output.num_cached_tokens == 0 for output in again)


def hold(llm: LLM) -> None:
    """Have the engine wait in the midst of the next request for the next order, however fast it is."""
    step, post, number, orders = llm._core.step, llm._engine.post, count(), list[object]()

    def stepped() -> list[Delta]:
        if next(number) == 10:
            wait_until(lambda: len(orders) > 1)  # the first is the request
        return step()

    def posted(*order: Any) -> None:
        post(*order)
        orders.append(order)

    llm._core.step, llm._engine.post = stepped, posted  # type: ignore[method-assign]


@pytest.mark.parametrize("overlap", [False, True])
def test_running_requests_are_ended_finished_or_resumed(
    tiny_model: Callable[..., str], overlap: bool
) -> None:
    llm = LLM(tiny_model(), max_model_len=256, async_scheduling=overlap)
    params = SamplingParams(temperature=0, max_tokens=240, ignore_eos=True)
    wanted = llm.generate("abc", params)[0].outputs[0].token_ids
    for mode in ("wait", "keep", "abort"):
        hold(llm)
        stream = llm.stream("abc", params)
        next(stream)
        llm.sleep(1, mode)
        llm.wake_up()
        sample = list(stream)[-1].outputs[0]
        assert sample.token_ids == wanted[: len(sample.token_ids)]
        assert sample.finish_reason == ("abort" if mode == "abort" else "length")
        assert (len(sample.token_ids) == 240) == (mode != "abort")
    llm.sleep(0)
    llm.wake_up()
    for wrong in ({"level": 3}, {"mode": "now"}):
        with pytest.raises(QuireError, match="sleep: "):
            llm.sleep(**wrong)  # type: ignore[arg-type]
    assert not llm.is_sleeping()
    with pytest.raises(QuireError, match="there is no 'disk'"):
        llm.wake_up(["disk"])
    assert llm.generate("abc", params)[0].outputs[0].token_ids == wanted


def test_prefixes_of_running_requests_are_reset_too(tiny_model: Callable[..., str]) -> None:
    llm = LLM(tiny_model(), max_model_len=256, async_scheduling=True)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    wanted = llm.generate("abc", params)[0].outputs[0].token_ids
    hold(llm)
    stream = llm.stream("abc", params)
    next(stream)
    assert llm.reset_prefix_cache(reset_running_requests=True)
    assert list(stream)[-1].outputs[0].token_ids == wanted
    assert llm.generate("abcdef", params)[0].num_cached_tokens <= 3
    llm._engine.ask(lambda core: core.scheduler.check())  # type: ignore[attr-defined]


def test_a_trace_shows_each_step(tiny_model: Callable[..., str], tmp_path: Path) -> None:
    llm = LLM(tiny_model(), max_model_len=64, profiler_config={"torch_profiler_dir": str(tmp_path)})
    assert llm.stop_profile() is None
    llm.start_profile("run", delay_iterations=1, max_iterations=4)
    llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
    path = llm.stop_profile()
    assert path is not None
    assert Path(path).name.startswith("run-")
    events = json.loads(Path(path).read_text())["traceEvents"]
    assert len(events) == 4
    assert all(event["args"]["sequences"] == 2 and event["dur"] > 0 for event in events)
    with pytest.raises(QuireError, match="profile_prefix"):
        llm.start_profile("../x")
