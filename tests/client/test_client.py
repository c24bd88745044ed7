"""The client against a real engine process with a scripted core: results, ends, faults, death and restart."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from quire.client import engine_process
from quire.client.client import AsyncEngine, ClientOptions
from quire.client.metrics import Metrics
from quire.config import EngineConfig
from quire.engine.verbs import ResetPrefixCache
from quire.errors import EngineError, ModelError, OverloadedError, RequestError
from quire.params import SamplingParams
from quire.types import FinishReason, Request
from tests.serve import scripted

MAKER = "tests.serve.scripted"


@asynccontextmanager
async def running(
    model: str = "scripted", max_num_seqs: int = 64, folder: Path | None = None, **options: object
) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig.from_options(
        model=model, max_num_seqs=max_num_seqs, download_dir=folder and str(folder)
    )
    engine = AsyncEngine(config, ClientOptions(maker=MAKER, **options), Metrics("scripted"))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def request(
    name: str, text: str = "abc", max_tokens: int = 30, eos: bool = False, **params: object
) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, **params)
    return Request(
        id=name,
        tokens=list(text.encode()),
        sampling=sampling,
        seed=0,
        max_tokens=max_tokens,
        eos_token_ids=(scripted.EOS,) if eos else (),
    )


async def collect(engine: AsyncEngine, wanted: Request) -> list[int]:
    tokens: list[int] = []
    async for delta in engine.generate(wanted):
        tokens += delta.tokens
        if delta.finish_reason is FinishReason.ERROR:
            raise EngineError(delta.error or "")
    return tokens


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.01)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 300))  # type: ignore[arg-type]


def test_many_requests_each_get_exactly_their_tokens() -> None:
    async def test() -> None:
        async with running() as engine:
            wanted = [request(str(i), f"prompt {i}", 10 + i % 50) for i in range(200)]
            results = await asyncio.gather(*(collect(engine, r) for r in wanted))
            for r, tokens in zip(wanted, results, strict=True):
                assert tokens == scripted.script(r, 0, r.max_tokens)
            assert engine.num_live == engine.num_queued == 0
            assert engine.metrics.generation_tokens == sum(map(len, results))
            assert engine.metrics.finished["length"] == 200

    run(test)


def test_a_reader_that_waits_gets_all_tokens_in_one_delta() -> None:
    async def test() -> None:
        async with running() as engine:
            wanted = request("slow", max_tokens=200, n=2, logprobs=1)
            with engine.submit([wanted]) as generation:
                await until(lambda: engine.num_live == 0)
                deltas = await generation.take()
                assert [d.index for d in deltas] == [0, 1]
                assert [len(d.tokens) for d in deltas] == [200, 200]
                assert all(len(d.logprobs or ()) == 200 for d in deltas)
                assert await generation.take() == []

    run(test)


def test_leaving_early_aborts_in_the_engine() -> None:
    async def test() -> None:
        async with running("scripted:delay=0.005") as engine:
            with engine.submit([request("gone", max_tokens=2000)]) as generation:
                assert await generation.take()
            assert engine.num_live == 0
            steps = (await engine.stats()).num_steps
            await asyncio.sleep(0.1)
            stats = await engine.stats()
            assert stats.num_steps <= steps + 1
            assert stats.num_used_blocks == stats.num_running == 0
            assert engine.metrics.finished["abort"] == 1

    run(test)


def test_ending_one_sample_leaves_the_other(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(folder=tmp_path) as engine:
            (tmp_path / "held").touch()
            wanted = request("two", "!held", max_tokens=60, n=2)
            seen: dict[int, int] = {0: 0, 1: 0}
            with engine.submit([wanted]) as generation:
                while deltas := await generation.take():
                    for delta in deltas:
                        seen[delta.index] += len(delta.tokens)
                    if seen[0] == 2 and (tmp_path / "held").exists():
                        generation.end_sample("two", 0)
                        (tmp_path / "held").unlink()
            assert seen[1] == 60
            assert seen[0] <= 3
            assert (await engine.stats()).num_running == 0

    run(test)


def test_a_poisoned_request_fails_alone() -> None:
    async def test() -> None:
        async with running("scripted:delay=0.001") as engine:
            good = [asyncio.create_task(collect(engine, request(f"g{i}", f"good {i}", 60))) for i in range(4)]
            with pytest.raises(EngineError, match="not finite"):
                await collect(engine, request("bad", "!poison", 60))
            with pytest.raises(EngineError, match="breaks the queue"):
                await collect(engine, request("worse", "!poison-add", 60))
            assert [len(t) for t in await asyncio.gather(*good)] == [60] * 4
            assert engine.metrics.restarts == 0
            assert engine.metrics.finished["error"] == 2

    run(test)


@pytest.mark.parametrize("word", ["!crash", "!raise"])
def test_a_dead_engine_is_started_again(word: str) -> None:
    async def test() -> None:
        async with running("scripted:delay=0.002") as engine:
            first = engine.pid
            victim = asyncio.create_task(collect(engine, request("victim", max_tokens=2000)))
            with pytest.raises(EngineError, match="send it again"):
                await collect(engine, request("bad", word))
            with pytest.raises(EngineError, match="send it again"):
                await victim
            assert not engine.healthy
            with pytest.raises(OverloadedError):
                engine.submit([request("early")])
            await until(lambda: engine.healthy)
            assert engine.pid != first
            assert len(await collect(engine, request("later", max_tokens=7))) == 7
            assert engine.metrics.restarts == 1
            assert engine.num_live == engine.num_queued == 0

    run(test)


def test_an_engine_that_is_killed_while_idle_is_replaced() -> None:
    async def test() -> None:
        async with running() as engine:
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            await until(lambda: engine.metrics.restarts == 1 and engine.healthy)
            assert len(await collect(engine, request("later", max_tokens=7))) == 7
            assert engine.metrics.kills == {"memory": 0, "hung": 0, "signal": 1}

    run(test)


def test_an_engine_that_memory_kills_is_counted_as_such(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kills = itertools.count()  # the control group's count rises between start and end
    monkeypatch.setattr(engine_process, "_kills", lambda: next(kills))

    async def test() -> None:
        async with running() as engine:
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            await until(lambda: engine.metrics.restarts == 1 and engine.healthy)
            assert engine.metrics.kills == {"memory": 1, "hung": 0, "signal": 0}

    run(test)
    assert "because memory ran out" in caplog.text


def test_a_hung_engine_is_not_healthy_and_an_idle_one_is() -> None:
    async def test() -> None:
        async with running(health_timeout=2.0) as engine:
            engine._last_event -= 60.0
            assert not engine.healthy
            await until(lambda: engine.healthy)  # it was asked
            hung = asyncio.create_task(collect(engine, request("hang", "!hang")))
            await until(lambda: not engine.healthy)
            hung.cancel()

    run(test)


@pytest.mark.parametrize("prompt", ["!hang", "!forever"])
def test_a_hung_engine_is_named_ended_and_replaced(prompt: str, caplog: pytest.LogCaptureFixture) -> None:
    """A step that never ends, and a process that is stopped."""

    async def test() -> None:
        async with running("scripted:delay=0.01", health_timeout=2.0) as engine:
            hung = asyncio.create_task(collect(engine, request("hang", prompt, max_tokens=1 << 20)))
            if prompt == "!forever":
                await until(lambda: engine.num_live > engine.num_queued)
                assert engine.pid is not None
                os.kill(engine.pid, signal.SIGSTOP)
            with pytest.raises(
                EngineError, match=r"gave no sign of life for 2 s, at its \w+.* send it again"
            ):
                await hung
            if engine.state == "restarting":
                assert "no sign of life" in engine.condition
            await until(lambda: engine.healthy)
            assert len(await collect(engine, request("later", max_tokens=7))) == 7
            assert engine.metrics.restarts == 1
            assert engine.metrics.kills == {"memory": 0, "hung": 1, "signal": 0}

    run(test)
    assert "the engine hangs: it gave no sign of life for 2 s" in caplog.text


def test_an_engine_that_is_busy_for_long_is_left_alone() -> None:
    async def test() -> None:
        async with running("scripted:delay=0.02", health_timeout=1.5) as engine:
            tokens = await collect(engine, request("long", "!forever", max_tokens=150))
            assert len(tokens) == 150
            assert engine.metrics.restarts == 0

    run(test)


def test_the_queue_is_bounded_all_or_none() -> None:
    async def test() -> None:
        async with running(
            "scripted:delay=0.05", 1, max_num_queued_reqs=3, max_num_queued_tokens=10
        ) as engine:
            with engine.submit([request("a", "abc", 500)]) as first:
                await first.take()
                with engine.submit([request("b"), request("c")]):
                    with pytest.raises(OverloadedError, match="queued-reqs"):
                        engine.submit([request("d"), request("e")])
                    with pytest.raises(OverloadedError, match="queued-tokens"):
                        engine.submit([request("f", "abcde")])
                    with pytest.raises(RequestError, match="one call"):
                        engine.submit([request("g", "a" * 11)])
                    assert engine.num_queued == 2
                assert engine.num_queued == 0
            assert engine.metrics.rejections["queue_full"] == 2

    run(test)


def test_a_full_queue_takes_owners_below_their_share_up_to_twice_its_limit() -> None:
    async def test() -> None:
        def of(owner: str, name: str) -> Request:
            return msgspec.structs.replace(request(name), owner=owner)

        async with running("scripted:delay=0.05", 1, max_num_queued_reqs=6) as engine:
            with engine.submit([request("runs", "abc", 500)]) as first:
                await first.take()
                with engine.submit([of("many", f"m{i}") for i in range(6)]):
                    with pytest.raises(OverloadedError, match="6 of 6"):
                        engine.submit([of("many", "m6")])
                    with engine.submit([of("few", f"f{i}") for i in range(3)]):
                        for owner, count in (("few", 1), ("many", 1), ("third", 3)):
                            with pytest.raises(OverloadedError, match="9 of 6"):
                                engine.submit([of(owner, f"{owner}-{i}") for i in range(count)])
                        with engine.submit([of("third", "t0"), of("third", "t1")]):
                            assert engine.num_queued == 11
                assert engine.num_queued == 0

    run(test)


def test_embedding_reset_and_stats() -> None:
    async def test() -> None:
        async with running() as engine:
            wanted = msgspec.structs.replace(request("e"), pooling="mean")
            deltas = [d async for d in engine.generate(wanted)]
            assert [d.embedding for d in deltas] == [scripted.embed(wanted.tokens, "mean")]
            assert engine.metrics.prompt_tokens == len(wanted.tokens)
            await engine.do(ResetPrefixCache())
            assert (await engine.stats()).num_blocks == scripted.NUM_BLOCKS

    run(test)


def test_what_keeps_the_engine_from_starting_is_told() -> None:
    async def start(model: str) -> None:
        config = EngineConfig.from_options(model=model)
        engine = AsyncEngine(config, ClientOptions(maker=MAKER), Metrics("m"))
        try:
            await engine.start()
        finally:
            await engine.stop()

    with pytest.raises(ModelError, match="scripted to fail"):
        asyncio.run(start("scripted:fail=1"))
    with pytest.raises(EngineError, match="scripted to break"):
        asyncio.run(start("scripted:broken=1"))


def test_the_engine_goes_when_its_parent_is_killed() -> None:
    code = f"""
import asyncio, sys
from quire.config import EngineConfig
from quire.client import engine_process
from quire.client.client import AsyncEngine, ClientOptions
from quire.client.metrics import Metrics
async def main():
    config = EngineConfig.from_options(model="scripted")
    engine = AsyncEngine(config, ClientOptions(maker={MAKER!r}), Metrics("m"))
    await engine.start()
    print(engine.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    engine = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    psutil.wait_procs([engine], timeout=60)
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE


def test_queue_times_come_from_the_engine() -> None:
    async def test() -> None:
        async with running("scripted:delay=0.01", 1) as engine:
            began = time.monotonic()
            await asyncio.gather(*(collect(engine, request(str(i), max_tokens=10)) for i in range(3)))
            passed = time.monotonic() - began
            histogram = engine.metrics.histograms["request_queue_time_seconds"][1]
            assert histogram.count == 3
            assert 0.2 < histogram.total < 2 * passed  # 0, then 10 steps, then 20 of 30

    run(test)
