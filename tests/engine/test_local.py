"""One engine, many callers: threads share the batch, interrupts and errors end one call and leave the rest whole."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import LLM, SamplingParams
from quire.errors import EngineError, RequestError
from tests.waiting import wait_until

PROMPTS = [[7, 8, 9], [11, 12], [3, 4, 5, 6, 7, 8], [20], [2, 2, 2], [9, 8, 7, 6]]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[..., str]) -> Iterator[LLM]:
    with make(tiny_model) as made:
        yield made


def make(tiny_model: Callable[..., str]) -> LLM:
    return LLM(tiny_model("llama"), max_model_len=64, block_size=16, skip_tokenizer_init=True)


def tokens(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return list(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)


def test_six_threads_share_one_object_and_each_gets_its_own(llm: LLM) -> None:
    alone = [tokens(llm, prompt) for prompt in PROMPTS]
    together: list[list[int]] = [[] for _ in PROMPTS]

    def work(place: int) -> None:
        for _ in range(3):
            together[place] = tokens(llm, PROMPTS[place])
            assert together[place] == alone[place]

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
    llm._engine.ask(lambda _: llm._core.scheduler.check())


def test_stream_and_generate_interleave(llm: LLM) -> None:
    alone = [tokens(llm, prompt) for prompt in PROMPTS[:2]]
    stream = llm.stream(PROMPTS[0], GREEDY)
    first = next(stream)
    assert tokens(llm, PROMPTS[1]) == alone[1]
    assert len(first.outputs[0].token_ids) >= 1
    assert list(list(stream)[-1].outputs[0].token_ids) == alone[0]


def test_leaving_a_stream_aborts_it_and_gives_its_blocks_back(llm: LLM) -> None:
    before = llm.stats().num_used_blocks
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    stream.close()
    wait_until(lambda: not llm.stats().num_running)
    assert llm.stats().num_used_blocks == before
    llm._engine.ask(lambda _: llm._core.scheduler.check())


@settings(max_examples=15, deadline=None)
@given(delay=st.floats(0, 0.05))
def test_an_interrupt_ends_the_call_and_nothing_else(llm: LLM, delay: float) -> None:
    """SIGINT at random times of a call: KeyboardInterrupt there, the object usable after it, the cache whole."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it
    alone = tokens(llm, PROMPTS[1])
    main = threading.main_thread().ident
    assert main is not None
    ended = threading.Event()

    def interrupt() -> None:
        """Send SIGINT, and again after seconds: Python swallows one that falls into a callback of its collector."""
        pause = delay
        while not ended.wait(pause):
            signal.pthread_kill(main, signal.SIGINT)
            pause = 5

    thread = threading.Thread(target=interrupt)

    def work() -> None:
        thread.start()
        while True:
            llm.generate(PROMPTS, SamplingParams(max_tokens=50, ignore_eos=True), use_tqdm=False)

    with pytest.raises(KeyboardInterrupt):
        work()
    ended.set()
    thread.join()
    assert tokens(llm, PROMPTS[1]) == alone
    llm._engine.ask(lambda _: llm._core.scheduler.check())


def test_an_error_in_one_call_leaves_the_others_alone(llm: LLM) -> None:
    with pytest.raises(RequestError):
        llm.generate([[1] * 100], GREEDY, use_tqdm=False)
    assert len(tokens(llm, PROMPTS[0])) == 24


def test_an_engine_that_fails_says_so_to_every_caller(tiny_model: Callable[..., str]) -> None:
    llm = make(tiny_model)

    def broken() -> None:
        raise RuntimeError("a bug")

    llm._core.step = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(EngineError, match="a bug"):
        tokens(llm, PROMPTS[0])
    with pytest.raises(EngineError, match="a bug"):
        llm.stats()
    llm.shutdown()


def test_shutdown_ends_calls_and_refuses_new_ones(tiny_model: Callable[..., str]) -> None:
    llm = make(tiny_model)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineError, match="shut down"):
        tokens(llm, PROMPTS[0])


def test_a_program_that_ends_with_an_open_stream_exits_cleanly() -> None:
    code = (
        "from quire import LLM, SamplingParams\n"
        "llm = LLM()\n"
        "stream = llm.stream('Once', SamplingParams(max_tokens=900, ignore_eos=True))\n"
        "next(stream)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forked_child_is_told_that_the_engine_is_its_parents(llm: LLM) -> None:
    """At once, and the parent's engine goes on; a child that only ends does no harm."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()

    def child() -> None:
        try:
            answers.put(str(tokens(llm, PROMPTS[0])))
        except EngineError as error:
            answers.put(str(error))

    process = context.Process(target=child)
    process.start()
    assert "a forked child cannot use its parent's LLM" in answers.get(timeout=60)
    process.join(60)
    assert process.exitcode == 0
    assert tokens(llm, PROMPTS[0])
