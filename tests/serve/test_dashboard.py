"""The page's files and its feed over raw HTTP, and the quantiles that it shows."""

from __future__ import annotations

import asyncio
import re
from importlib.resources import files
from types import SimpleNamespace
from typing import Any, cast

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from quire.client.client import AsyncEngine
from quire.client.metrics import Metrics, RequestTimes
from quire.params import SamplingParams
from quire.serve.dashboard.history import SPANS, History, Reading, quantile
from quire.serve.dashboard.router import dashboard_router, load_assets, open_paths
from quire.serve.dashboard.stats import PageSource, request_row
from quire.types import EngineStats, Request
from tests.serve.dashboard_page import World, app_of

STATIC = files("quire.serve.dashboard") / "static"


def ask(app: FastAPI, path: str, **options: Any) -> httpx.Response:
    async def work() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            return await client.get(path, **options)

    return asyncio.run(work())


def test_every_file_is_served_with_its_type_and_no_leave_to_load_anything_else() -> None:
    app = app_of(World())
    kinds = {}
    for path in sorted(open_paths()):
        answer = ask(app, path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        kinds[path.rpartition(".")[2]] = answer.headers["content-type"].partition(";")[0]
    assert kinds.pop("/dashboard/reference") == "text/html"
    assert kinds == {"/": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def test_a_page_that_is_known_is_not_sent_again() -> None:
    app = app_of(World())
    first = ask(app, "/dashboard/app.css")
    again = ask(app, "/dashboard/app.css", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path", ["/dashboard/", "/dashboard/router.py", "/dashboard/..%2frouter.py", "/dashboard/index.html"]
)
def test_nothing_else_is_served(path: str) -> None:
    assert ask(app_of(World()), path).status_code == 404


def test_the_page_holds_no_script_no_style_and_no_address_of_its_own() -> None:
    for name in ("index.html", "reference.html"):
        page = (STATIC / name).read_text()
        assert not re.search(r"<script(?![^>]*\ssrc=)", page)
        assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", page)
    for asset in load_assets().values():
        text = asset.body.decode()
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|//cdn", text)
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
        )


def test_every_element_that_a_script_wants_is_on_the_page() -> None:
    page = (STATIC / "index.html").read_text()
    there = set(re.findall(r'\sid="([\w-]+)"', page))
    reference = set(re.findall(r'\sid="([\w-]+)"', (STATIC / "reference.html").read_text()))
    for name, asset in load_assets().items():
        if name.endswith(".js"):
            wanted = set(re.findall(r'(?:\$|getElementById)\("([\w-]+)"\)', asset.body.decode()))
            assert wanted <= (reference if name == "reference.js" else there), name
    assert set(re.findall(r'(?:aria-controls|aria-labelledby)="([\w-]+)"', page)) <= there


def test_events_are_snapshots_and_end_when_the_server_drains() -> None:
    world = World()
    world.stats["draining"] = True
    answer = ask(app_of(world), "/dashboard/events")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-store"
    (line,) = answer.text.strip().split("\n\n")
    assert msgspec.json.decode(line.removeprefix("data: "))["num_running"] == 3


def test_the_page_is_not_part_of_the_api() -> None:
    app = FastAPI()
    app.include_router(dashboard_router(World()))
    assert app.openapi()["paths"] == {}


# --- quantiles


def test_quantiles_by_hand() -> None:
    bounds = (1.0, 2.0, 4.0)
    assert quantile(bounds, [0, 0, 0, 0], 0.5) is None
    assert quantile(bounds, [0, 10, 0, 0], 0.5) == pytest.approx(1.5)
    assert quantile(bounds, [10, 10, 0, 0], 0.5) == pytest.approx(1.0)
    assert quantile(bounds, [1, 0, 1, 0], 0.99) == pytest.approx(2 + 2 * 0.98)
    assert quantile(bounds, [0, 0, 0, 5], 0.5) == 4.0


@given(st.lists(st.floats(0.01, 3.99), min_size=1, max_size=50), st.floats(0.01, 0.99))
def test_a_quantile_is_in_the_bucket_where_it_belongs(values: list[float], share: float) -> None:
    bounds = [i / 2 for i in range(1, 9)]
    counts = [
        sum(1 for v in values if low < v <= high) for low, high in zip([0.0, *bounds], bounds, strict=False)
    ]
    found = quantile(bounds, [*counts, 0], share)
    assert found is not None
    at_most = sum(v <= found + 0.5 for v in values) / len(values)
    below = sum(v < found - 0.5 for v in values) / len(values)
    assert below <= share <= at_most


def test_a_snapshot_shows_what_is_recent() -> None:
    metrics = Metrics("tiny")
    metrics.stats = EngineStats(num_running=2, num_blocks=8, num_used_blocks=3)
    metrics.generation_tokens = 11
    now = [100.0]
    engine = cast(AsyncEngine, SimpleNamespace(metrics=metrics, live_times=list))
    source = PageSource(engine, lambda: {"healthy": True}, dict, clock=lambda: now[0])

    def take() -> dict[str, Any]:
        return asyncio.run(source.snapshot())

    metrics.observe("inter_token_latency_seconds", 5.0)
    first = take()
    assert (first["model"], first["num_running"], first["generation_tokens"], first["healthy"]) == (
        "tiny",
        2,
        11,
        True,
    )
    assert first["itl_p50"] is None
    for _ in range(100):
        metrics.observe("inter_token_latency_seconds", 0.03)
    now[0] += 1
    second = take()
    assert 0.025 < second["itl_p50"] <= 0.05
    assert 0.025 < second["itl_p99"] <= 0.05
    assert second["ttft_p50"] is None
    now[0] += 60
    assert take()["itl_p50"] is None
    assert msgspec.json.decode(msgspec.json.encode(second))["finished"]["stop"] == 0


# --- history and live requests


def reading(time: float, tokens: int, counts: list[int], restarts: int = 0) -> Reading:
    return Reading(time, tokens, 1, 2, restarts, {"ttft": ((1.0, 2.0), counts)})


def test_history_keeps_rates_and_medians_by_interval() -> None:
    now = reading(1000.0, 0, [0, 0, 0])
    history = History(lambda: now)
    history.tick()
    for second in range(1, 21):
        now = reading(1000.0 + second, second * 10, [second, 0, 0], restarts=second // 20)
        history.tick()
    rings = history.rings()
    assert [row["rate"] for row in rings["300"]] == [10.0] * 20
    assert rings["300"][-1]["restarts"] == 1
    assert rings["300"][0]["ttft_p50"] == pytest.approx(0.5)
    assert [row["time"] for row in rings["3600"]] == [1015.0]
    assert rings["86400"] == []
    assert set(history.latest()) == {"300", "3600"}


def test_history_is_bounded_and_survives_a_clock_that_goes_back() -> None:
    now = reading(0.0, 0, [0, 0, 0])
    history = History(lambda: now)
    for second in range(0, 2000):
        now = reading(float(second), second, [0, 0, 0])
        history.tick()
    assert len(history.rings()["300"]) == 300 == SPANS[0][0]
    now = reading(5.0, 2000, [0, 0, 0])
    history.tick()
    now = reading(6.0, 2010, [0, 0, 0])
    history.tick()
    assert history.rings()["300"][-1]["rate"] == 10.0


def test_live_requests_are_counts_and_never_text() -> None:
    request = Request(id="r1", tokens=[1] * 40, sampling=SamplingParams(max_tokens=5), seed=0, max_tokens=5)
    times = RequestTimes(
        request, arrival=90.0, scheduled=91.0, first_token=92.0, last_token=96.0, num_output=9
    )
    row = request_row(times, 100.0, 16)
    assert row == {
        "id": "r1",
        "state": "writing",
        "age": 10.0,
        "prompt": 40,
        "cached": 0,
        "output": 9,
        "rate": 2.0,
        "blocks": 4,
    }
    waiting = request_row(RequestTimes(request, arrival=90.0), 100.0, 16)
    assert (waiting["state"], waiting["blocks"], waiting["rate"]) == ("waiting", 0, None)
