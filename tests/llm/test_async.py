"""`AsyncLLM` as a service embeds it: streams from many clients, disconnects, sleep, health, its end."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from quire import LLM, AsyncLLM, PoolingParams, RequestOutputKind, SamplingParams
from quire.errors import EngineError, ModelError, OverloadedError, RequestError
from quire.params import StructuredOutputsParams
from tests.waiting import wait_until

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


@pytest.fixture(scope="module")
def path(tiny_model: Callable[..., str]) -> str:
    return tiny_model()


@pytest.fixture(scope="module")
def engine(path: str) -> Iterator[AsyncLLM]:
    engine = AsyncLLM.from_options(
        model=path,
        max_model_len=512,
        max_num_seqs=16,
        enforce_eager=True,
        threads=1,
        logits_processors=["tests.llm.slow:Slow"],
    )
    yield engine
    engine.shutdown()
    assert engine.is_stopped


async def whole(engine: AsyncLLM, prompt: Any, params: SamplingParams, name: str) -> Any:
    last = None
    async for output in engine.generate(prompt, params, name):
        last = output
    return last


def test_it_answers_as_llm_does(engine: AsyncLLM, path: str) -> None:
    llm = LLM(path, max_model_len=512)
    prompts = ["abc", "hello", {"prompt_token_ids": [3, 4, 5]}]
    params = [GREEDY, SamplingParams(seed=3, max_tokens=12, ignore_eos=True, logprobs=2), GREEDY]
    wanted = llm.generate(prompts, params, use_tqdm=False)

    async def run() -> list[Any]:
        jobs = [whole(engine, p, s, f"r{i}") for i, (p, s) in enumerate(zip(prompts, params, strict=True))]
        return await asyncio.gather(*jobs)

    outputs = asyncio.run(run())
    assert [output.outputs for output in outputs] == [output.outputs for output in wanted]
    assert [output.request_id for output in outputs] == ["r0", "r1", "r2"]
    vector = llm.encode("abc")[0].outputs.data

    async def more() -> None:
        lengths = [len(o.outputs[0].token_ids) async for o in engine.generate("abc", GREEDY, "x")]
        assert lengths == sorted(set(lengths))
        lengths = [len(o.outputs[0].token_ids) async for o in engine.generate("abc", LONG, "x")]
        assert sum(lengths) == 400
        final = SamplingParams(
            **{"temperature": 0, "max_tokens": 5, "output_kind": RequestOutputKind.FINAL_ONLY}
        )
        assert len([o async for o in engine.generate("abc", final, "y")]) == 1
        found = [o async for o in engine.encode("abc", PoolingParams(), "v")]
        assert found[0].outputs.data == vector
        digits = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(regex="[0-9]{4}"))
        assert (await whole(engine, "abc", digits, "g")).outputs[0].text.isdigit()
        with pytest.raises(RequestError, match="the prompt is empty"):
            await whole(engine, {"prompt_token_ids": []}, GREEDY, "bad")
        with pytest.raises(RequestError, match="functions of this process"):
            await whole(engine, "a", SamplingParams(logits_processors=[lambda o, x: x]), "bad")
        await engine.check_health()
        assert (await engine.get_supported_tasks())[0] == "generate"
        assert b"vllm:generation_tokens" in await engine.metrics_text()
        assert await engine.reset_prefix_cache()

    asyncio.run(more())


def test_abort_and_sleep(engine: AsyncLLM) -> None:
    async def run() -> None:
        async def read() -> Any:
            slow = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, extra_args={"slow": True})
            return [o async for o in engine.generate("abc", slow, "doomed")]

        task = asyncio.create_task(read())
        while not engine.get_num_unfinished_requests():
            await asyncio.sleep(0.005)
        await engine.abort("doomed")
        outputs = await task
        assert outputs[-1].outputs[0].finish_reason == "abort"
        before = (await whole(engine, "abc", GREEDY, "a")).outputs
        for level in (1, 2):
            await engine.sleep(level)
            assert await engine.is_sleeping()
            with pytest.raises(OverloadedError, match="the engine sleeps"):
                await whole(engine, "abc", GREEDY, "b")
            await engine.wake_up()
            assert (await whole(engine, "abc", GREEDY, "c")).outputs == before
        await engine.pause_generation()
        assert await engine.is_paused()
        await engine.resume_generation()
        assert (await whole(engine, "abc", GREEDY, "d")).outputs == before
        with pytest.raises(EngineError, match="sleep: mode must be"):
            await engine.sleep(1, "later")
        assert not await engine.is_sleeping()

    asyncio.run(run())


def service(engine: AsyncLLM) -> FastAPI:
    """What people build: a stream of lines for a prompt."""
    app = FastAPI()
    numbers = iter(range(1000))

    @app.get("/write")
    async def write(prompt: str, max_tokens: int, slow: bool) -> StreamingResponse:
        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"slow": slow},
        )

        async def lines() -> AsyncIterator[str]:
            async for output in engine.generate(prompt, params, f"web-{next(numbers)}"):
                yield json.dumps(output.outputs[0].token_ids) + "\n"

        return StreamingResponse(lines())

    return app


def test_a_service_whose_clients_leave(engine: AsyncLLM) -> None:
    """Ten clients: half leave in the middle. The others get all; nothing is left running."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(service(engine), log_level="error", ws="none"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/write"

    async def client(number: int) -> list[int]:
        tokens: list[int] = []
        leaves = number % 2 == 1
        async with (
            httpx.AsyncClient(timeout=120) as http,
            http.stream(
                "GET", url, params={"prompt": "abc", "max_tokens": 450 if leaves else 30, "slow": leaves}
            ) as reply,
        ):
            async for line in reply.aiter_lines():
                tokens += json.loads(line)
                if leaves and len(tokens) > 5:
                    return tokens
        return tokens

    async def run() -> list[list[int]]:
        return await asyncio.gather(*(client(number) for number in range(10)))

    before = asyncio.run(engine._bridged(engine._engine.stats())).generation_tokens
    try:
        results = asyncio.run(run())
        assert all(len(tokens) == 30 and tokens == results[0] for tokens in results[::2])
        assert all(len(tokens) < 450 for tokens in results[1::2])
        wait_until(lambda: engine.get_num_unfinished_requests() == 0)
        stats = asyncio.run(engine._bridged(engine._engine.stats()))
        assert stats.generation_tokens - before < 5 * (30 + 450)  # those that left were ended
        assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def test_start_and_end(path: str, tmp_path: Any) -> None:
    with pytest.raises(ModelError, match=r"no config.json"):
        AsyncLLM.from_options(str(tmp_path))
    engine = AsyncLLM.from_options(path, max_model_len=64, threads=1)
    pid = engine._engine.pid
    assert pid is not None
    os.kill(pid, 0)
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
