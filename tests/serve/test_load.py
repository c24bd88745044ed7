"""Many clients at once: no error, no lost or doubled token, nothing left behind. Scripted core and shipped model."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator

import httpx
import psutil
import pytest

from tests.serve import scripted
from tests.serve.running import Server, start
from tests.waiting import wait_until

REAL = "quire.client.start"


@pytest.fixture(scope="module")
def shipped() -> Iterator[Server]:
    server = start(maker=REAL, model="", disable_uvicorn_access_log=True)
    yield server
    assert server.stop() == 0


async def streamed(
    http: httpx.AsyncClient, body: dict[str, object], leave_after: int | None = None
) -> list[int]:
    """The token ids of a stream, in order; leaves after some events if told to."""
    tokens: list[int] = []
    num_events = 0
    async with http.stream(
        "POST", "/v1/completions", json={**body, "stream": True, "return_token_ids": True}
    ) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for data in events(answer):
            assert "error" not in data, data
            for choice in data["choices"]:  # type: ignore[union-attr]
                tokens += choice["token_ids"]
            num_events += 1
            if num_events == leave_after:
                break
    return tokens


async def events(answer: httpx.Response) -> AsyncIterator[dict[str, object]]:
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def client(server: Server) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits)


def idle(server: Server) -> dict[str, int]:
    """The engine's numbers once it has nothing to do."""
    with server.client as http:

        def stats() -> dict[str, int]:
            return http.get("/stats").json()  # type: ignore[no-any-return]

        wait_until(lambda: not any(map(stats().get, ("num_running", "num_waiting", "requests_live"))))
        return stats()


def test_200_streams_of_a_script_lose_nothing() -> None:
    server = start(max_num_seqs=64, disable_uvicorn_access_log=True)

    async def work() -> None:
        async with client(server) as http:
            bodies = [
                {"prompt": f"p{i}", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
                for i in range(200)
            ]
            answers = await asyncio.gather(*(streamed(http, body) for body in bodies))
        for i, tokens in enumerate(answers):
            assert tokens == scripted.script_of(f"p{i}", 40)

    asyncio.run(work())
    assert idle(server)["num_used_blocks"] == 0
    assert server.stop() == 0


def test_200_streams_of_the_shipped_model_equal_single_ones(shipped: Server) -> None:
    bodies = [
        {"prompt": f"Once upon a time there was a {word}", "max_tokens": 24, "seed": i, "temperature": i % 2}
        for i, word in enumerate(["cat", "dog", "girl", "boy", "bird", "fish", "tree", "king"] * 25)
    ]

    async def work() -> None:
        async with client(shipped) as http:
            together = await asyncio.gather(*(streamed(http, body) for body in bodies))
            for i in range(0, 200, 9):
                assert together[i] == await streamed(http, bodies[i])
            for i in range(0, 200, 40):
                whole = (
                    await http.post("/v1/completions", json={**bodies[i], "return_token_ids": True})
                ).json()
                assert whole["choices"][0]["token_ids"] == together[i]

    asyncio.run(work())
    assert idle(shipped)["num_used_blocks"] == 0


def test_random_leaving_leaves_no_block_in_use(shipped: Server) -> None:
    rng = random.Random(1)

    async def work() -> None:
        async with client(shipped) as http:
            bodies = [
                {"prompt": f"The {i}th story", "max_tokens": 120, "n": rng.choice([1, 3]), "ignore_eos": True}
                for i in range(60)
            ]
            await asyncio.gather(*(streamed(http, body, rng.choice([1, 2, 5, 20, None])) for body in bodies))

    asyncio.run(work())
    stats = idle(shipped)
    assert stats["num_used_blocks"] == 0
    assert stats["num_cached_blocks"] + stats["num_free_blocks"] == stats["num_blocks"]


def test_embeddings_of_the_shipped_model_do_not_depend_on_company(shipped: Server) -> None:
    with shipped.client as http:
        both = http.post("/v1/embeddings", json={"input": ["a cat", "a long story about a dog"]}).json()[
            "data"
        ]
        alone = http.post("/v1/embeddings", json={"input": "a cat"}).json()["data"]
        mean = http.post("/v1/embeddings", json={"input": "a cat", "pooling": "mean"}).json()["data"]
    assert both[0]["embedding"] == alone[0]["embedding"]
    assert sum(x * x for x in alone[0]["embedding"]) == pytest.approx(1, abs=1e-3)
    assert mean[0]["embedding"] != alone[0]["embedding"]


@pytest.mark.slow
def test_memory_is_flat_over_many_requests() -> None:
    # The KV cache becomes resident as it is first written: a small one is full after the first round.
    shipped = start(maker=REAL, model="", disable_uvicorn_access_log=True, num_gpu_blocks_override=256)
    processes = [psutil.Process(shipped.process.pid), psutil.Process(shipped.engine_pid)]

    async def work(first: int, number: int) -> None:
        async with client(shipped) as http:
            gate = asyncio.Semaphore(32)

            async def one(i: int) -> None:
                async with gate:
                    body = {"prompt": f"Story {i} of a {i * 7 % 100}", "max_tokens": 4, "stream": i % 2 == 0}
                    assert (await http.post("/v1/completions", json=body)).status_code == 200

            await asyncio.gather(*(one(first + i) for i in range(number)))

    asyncio.run(work(0, 1000))
    before = [process.memory_info().rss for process in processes]
    asyncio.run(work(1000, 3000))
    after = [process.memory_info().rss for process in processes]
    for name, old, new in zip(("server", "engine"), before, after, strict=True):
        assert new - old < 6 << 20, f"{name}: {old >> 20} MiB became {new >> 20} MiB"
    assert shipped.stop() == 0
