"""Replicas that compute unlike bits: a stream goes from one to another only where it may, and says so."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import _native, assets
from tests.adapter_files import write_adapter
from tests.cluster.stand_in import KEY, Running, router
from tests.serve.running import Server, start
from tests.waiting import wait_until

BOSS = {"authorization": "Bearer boss"}
PROMPTS = ("Once upon a time", "A dog", "The sun", "Lily saw")
LONG = {"max_tokens": 400, "ignore_eos": True}


def open_one(**options: Any) -> Server:
    return start(
        maker="tests.serve.slowed", model="", threads=1, router_api_key=[KEY], served_model_name=["m"],
        max_model_len=512, kv_cache_memory_bytes=1 << 26, **{"enable_lora": True, **options},
    )  # fmt: skip


def class_of(server: Server, model: str = "m") -> str:
    with server.client as http:
        about = http.get("/internal/replica", headers={"authorization": f"Bearer {KEY}"}).json()
    return str(about["models"][model]["class"])


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two adapters, which have one name at two replicas."""
    folder, model = tmp_path_factory.mktemp("adapters"), Path(assets.__path__[0]) / "quire-stories"
    return [f"tale={write_adapter(folder / str(seed), model, seed)}" for seed in (1, 2)]


@pytest.fixture(scope="module")
def usual(adapters: list[str]) -> Iterator[Server]:
    running = open_one(lora_modules=adapters[:1])
    yield running
    running.process.kill()
    running.wait()


def options_of(case: str, adapters: list[str]) -> dict[str, Any]:
    if case == "scalar" and _native.available_isas() == ["scalar"]:
        pytest.skip("needs a CPU with two instruction sets")
    return {
        "scalar": {"isa": "scalar", "lora_modules": adapters[:1]},
        "int8": {"quantization": "int8", "lora_modules": adapters[:1]},
        "adapter": {"lora_modules": adapters[1:]},
    }[case]


def body_of(prompt: str, model: str, stream: bool) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "stream": stream, **LONG}


def text_of(answer: str) -> str:
    lines = [line[6:] for line in answer.splitlines() if line.startswith("data: {")] or [answer]
    events = [json.loads(line) for line in lines]
    return "".join(event["choices"][0]["text"] for event in events if event.get("choices"))


class Asked:
    """One request through a router."""

    def __init__(self, running: Running, prompt: str, model: str, stream: bool) -> None:
        self.parts: list[str] = []
        headers = {"x-request-id": f"id-{PROMPTS.index(prompt)}"}
        body = body_of(prompt, model, stream)
        with (
            httpx.Client(base_url=running.url, timeout=300) as client,
            client.stream("POST", "/v1/completions", json=body, headers=headers) as answer,
        ):
            self.status, self.headers = answer.status_code, answer.headers
            self.parts += answer.iter_text()

    @property
    def all(self) -> str:
        return "".join(self.parts)

    @property
    def crossed(self) -> str:
        """The class that it says to have crossed to."""
        named = [*re.findall(r"^: quire crossed (\w+)$", self.all, re.MULTILINE)]
        return "".join([*named, self.headers.get("x-quire-crossed", "")])


def moved(
    usual: Server, other: Server, model: str, stream: bool, *options: str
) -> tuple[list[Asked], list[Asked]]:
    """What was asked of `other` alone, and again while it was killed."""
    addresses = ("--replica", usual.url, "--replica", other.url)
    with router(*addresses, "--admin-api-key", "boss", *options) as running:
        wait_until(lambda: running.metric('quire_route_replicas{what="up"}') == 2, 60)
        httpx.post(f"{running.url}/drain?replica=0", headers=BOSS).raise_for_status()
        with ThreadPoolExecutor(len(PROMPTS)) as clients:
            alone = [*clients.map(lambda prompt: Asked(running, prompt, model, stream), PROMPTS)]
            asked = [clients.submit(Asked, running, prompt, model, stream) for prompt in PROMPTS]
            wait_until(lambda: running.metric("quire_route_running") == len(PROMPTS))
            httpx.post(f"{running.url}/undrain?replica=0", headers=BOSS).raise_for_status()
            other.process.kill()
            other.wait()
            answers = [one.result() for one in asked]
        crossed = running.metric('quire_route_moves_total{cause="crossed"}')
        assert crossed == sum(bool(one.crossed) for one in answers)
    return alone, answers


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("case", ["scalar", "int8", "adapter"])
def test_an_answer_that_crosses_classes_says_so(
    usual: Server, adapters: list[str], case: str, stream: bool
) -> None:
    model, other = "tale" if case == "adapter" else "m", open_one(**options_of(case, adapters))
    assert class_of(usual, model) != class_of(other, model)
    assert (class_of(usual) == class_of(other)) == (case == "adapter")
    to = class_of(usual, model)
    alone, answers = moved(usual, other, model, stream)
    for before, after in zip(alone, answers, strict=True):
        assert after.status == 200
        assert before.crossed == ""
        assert after.crossed in ("", to)
        assert after.crossed or text_of(after.all) == text_of(before.all)
        assert not stream or after.all.rstrip().endswith("data: [DONE]")
    assert any(one.crossed for one in answers)


def test_replicas_whose_adapters_alone_are_unlike_are_equal_for_the_base_model(
    usual: Server, adapters: list[str]
) -> None:
    alone, answers = moved(usual, open_one(**options_of("adapter", adapters)), "m", True)
    assert [text_of(one.all) for one in answers] == [text_of(one.all) for one in alone]
    assert not any(one.crossed for one in answers)


@pytest.mark.parametrize("stream", [True, False])
def test_where_no_class_may_be_crossed_an_answer_fails_in_a_line(
    usual: Server, adapters: list[str], stream: bool
) -> None:
    other = open_one(**options_of("int8", adapters))
    refuse = ("--failover-across", "refuse", "--failover-timeout", "1")
    _, answers = moved(usual, other, "m", stream, *refuse)
    lost = [one for one in answers if "no replica can answer" in one.all]
    assert lost
    for one in lost:
        assert not one.crossed
        assert one.status == (200 if stream else 503)
        assert "[DONE]" not in one.all
        (line,) = [line for line in one.all.splitlines() if "no replica can answer" in line]
        assert json.loads(line.removeprefix("data: "))["error"]["code"]
