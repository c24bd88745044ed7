"""Streams of all kinds over three replicas of the shipped model that are killed, frozen and drained."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.cluster.fleet import Fleet, Load, ask, said
from tests.cluster.stand_in import Running, router
from tests.waiting import stopped, wait_until


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    made.kill_all()


@pytest.fixture
def routed(fleet: Fleet) -> Iterator[Running]:
    with router(*fleet.options(), "--verify-failover", "0.3", "--failover-timeout", "120") as running:
        wait_until(lambda: running.metric('quire_route_replicas{what="up"}') == 3, 60)
        yield running
        assert running.metric('quire_route_checks_total{result="differed"}') == 0


def test_no_answer_is_lost_or_changed(fleet: Fleet, routed: Running) -> None:
    load = Load(routed, 6)
    assert len(load.classes["adapter"]) == 1
    assert load.classes["adapter"] == load.classes["whole adapter"] == load.classes["adapter-chat"]
    assert load.classes["adapter"] != load.classes["greedy"]
    for place, how in enumerate(("kill", "engine", "freeze", "drain")):
        time.sleep(1)
        fleet.disturb(place % 3, how)
    load.end()
    assert load.wrong == []
    assert routed.metric("quire_route_moves_total") > 0


def test_a_frozen_engine_is_left_while_its_server_lives(fleet: Fleet, routed: Running) -> None:
    kinds = ["whole", "beams", "whole chat", "whole adapter", "program", "greedy", "chat"]
    wanted = {kind: said(kind, ask(routed, kind)) for kind in kinds}
    engines = [server.engine_pid for server in fleet.servers[:2] if server is not None]
    with stopped(*engines), ThreadPoolExecutor(2 * len(kinds)) as clients:
        answers = [*clients.map(lambda kind: (kind, ask(routed, kind)), [*kinds, *kinds])]
    assert all(said(kind, text) == wanted[kind] for kind, text in answers)
    assert not any("the engine hangs" in server.log for server in fleet.servers if server is not None)
    wait_until(lambda: routed.metric('quire_route_replicas{what="up"}') == 3, 60)


def test_all_are_away_for_five_seconds(fleet: Fleet, routed: Running) -> None:
    load = Load(routed, 8, ["long", "whole", "chat", "adapter", "responses", "messages"])
    time.sleep(1)
    fleet.kill_all()
    with ThreadPoolExecutor(1) as client:  # streams get comment lines, so only a whole answer shows the wait
        late = client.submit(ask, routed, "whole", load.waits)
        time.sleep(5)
        fleet.start_all()
        assert said("whole", late.result()) == load.wanted["whole"]
    wait_until(lambda: routed.metric('quire_route_replicas{what="up"}') == 3, 60)
    load.end()
    assert load.wrong == []
    assert load.longest[0].seconds > 5


def test_whole_answers_outlive_a_replica_that_had_no_time_for_them(fleet: Fleet, routed: Running) -> None:
    load = Load(routed, 8, ["long whole", "beams", "program"])
    time.sleep(1)
    server = fleet.servers[0]
    assert server is not None
    for _ in range(2):  # the second signal: at once
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    server.wait()
    load.end()
    fleet.start(0)
    assert load.wrong == []


PROMPT, TALK = "Once upon a time", [{"role": "user", "content": "Tell me of a dog."}]
LONG = {"extra_body": {"ignore_eos": True}, "extra_headers": {"x-request-id": "official"}}


def openai_calls(url: str) -> dict[str, Callable[[], str]]:
    """What OpenAI's client is asked, streamed and whole."""
    openai = pytest.importorskip("openai", reason="needs OpenAI's client")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    text: dict[str, Any] = {"model": "m", "prompt": PROMPT, "max_tokens": 150, **LONG}
    chat: dict[str, Any] = {"model": "m", "messages": TALK, "max_tokens": 150, **LONG}
    given: dict[str, Any] = {"model": "m", "input": "Tell me of a dog.", "max_output_tokens": 150, **LONG}

    def responses() -> str:
        events = [*client.responses.create(**given, stream=True)]
        assert [event.sequence_number for event in events] == [*range(len(events))]
        return str(events[-1].response.output_text)

    return {
        "completions": lambda: client.completions.create(**text).choices[0].text,
        "completions, streamed": lambda: "".join(
            part.choices[0].text for part in client.completions.create(**text, stream=True)
        ),
        "chat": lambda: client.chat.completions.create(**chat).choices[0].message.content,
        "chat, streamed": lambda: "".join(
            part.choices[0].delta.content or ""
            for part in client.chat.completions.create(**chat, stream=True)
        ),
        "responses": lambda: client.responses.create(**given).output_text,
        "responses, streamed": responses,
    }


def anthropic_calls(url: str) -> dict[str, Callable[[], str]]:
    """What Anthropic's client is asked."""
    anthropic = pytest.importorskip("anthropic", reason="needs Anthropic's client")
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120)
    asked: dict[str, Any] = {"model": "m", "messages": TALK, "max_tokens": 150, **LONG}

    def streamed() -> str:
        with client.messages.stream(**asked) as stream:
            text = "".join(stream.text_stream)
            assert text == stream.get_final_message().content[0].text
            return text

    return {
        "messages": lambda: client.messages.create(**asked).content[0].text,
        "messages, streamed": streamed,
    }


@pytest.mark.parametrize("calls", [openai_calls, anthropic_calls])
def test_official_clients_see_nothing_of_a_kill(
    fleet: Fleet, routed: Running, calls: Callable[[str], dict[str, Callable[[], str]]]
) -> None:
    asked = calls(routed.url)
    alone = {name: call() for name, call in asked.items()}
    assert alone["responses, streamed"] == alone["responses"] if "responses" in alone else True
    over, counts = threading.Event(), dict.fromkeys(asked, 0)

    def again(name: str) -> None:
        while not over.is_set() or not counts[name]:
            assert asked[name]() == alone[name]
            counts[name] += 1

    with ThreadPoolExecutor(len(asked)) as clients:
        running = [clients.submit(again, name) for name in asked]
        try:
            for place in range(3):
                time.sleep(0.7)
                fleet.disturb(place, "kill")
        finally:
            over.set()
        for one in running:
            one.result()
    assert routed.metric("quire_route_moves_total") > 0
