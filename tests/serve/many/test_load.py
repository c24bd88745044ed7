"""Many models under load: answers stay what they are, turns are shared by weight, and memory does not grow."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest
import torch
from transformers import BertConfig, BertModel

from quire.engine.directory import SHIPPED_MODEL
from quire.weights.hub import ASSETS
from tests.model.test_encoders import SIZES, write_tokenizer
from tests.serve.many.crowd import (
    MB,
    Crowd,
    chat,
    children,
    completion,
    counted,
    embedding,
    entry,
    listed,
    rounds,
    spells,
    turns,
)
from tests.serve.running import Server, start
from tests.waiting import stopped, wait_until

OPTIONS: dict[str, Any] = {"maker": "quire.client.start", "model": "", "threads": 1}
LORA = {"enable_lora": True, "lora_modules": [f"tale={ASSETS / 'quire-stories-lora-oldtale'}"]}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An embedding model."""
    path = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    BertModel(BertConfig(**SIZES)).eval().save_pretrained(path)
    write_tokenizer(path)
    return str(path)


def ended(server: Server) -> None:
    assert server.stop() == 0, server.log
    assert "unexpected error" not in server.log, server.log


def test_chats_adapters_and_vectors_stay_what_they_are_through_switches(
    tmp_path: Path, encoder: str, tiny_model: Callable[..., str]
) -> None:
    """No request that runs is aborted: each has the answer of an idle server."""
    models = [
        entry("stories", str(ASSETS / SHIPPED_MODEL), {**LORA, "max_model_len": 256}),
        entry("vectors", encoder, {"kv_cache_memory_bytes": None}),
        entry("tokens", tiny_model(), {"skip_tokenizer_init": True}),
    ]
    server = start(
        **OPTIONS, models_file=listed(tmp_path, *models), models_memory=1, models_max=1, models_turn=0.2
    )
    asks = [ask for seed in range(4) for ask in (chat("stories", seed), chat("tale", seed))]
    asks += [ask for seed in range(4) for ask in (embedding("vectors", seed), completion("tokens", seed))]
    crowd = Crowd(server, asks)
    assert all(not answer[0].isdigit() for answer in crowd.right), crowd.right
    crowd.run(clients=8, seconds=400, most=80)
    assert crowd.wrong == []
    assert sum(crowd.done.values()) == 80
    assert len(turns(server)) == 3
    ended(server)


def test_two_busy_models_share_by_weight(tmp_path: Path, tiny_model: Callable[..., str]) -> None:
    models = [
        entry("light", tiny_model(), {"skip_tokenizer_init": True}),
        entry("heavy", tiny_model("qwen2"), {"skip_tokenizer_init": True}, weight=3),
    ]
    server = start(**OPTIONS, models_file=listed(tmp_path, *models), models_memory=0.11, models_turn=0.8)
    crowds = {
        name: Crowd(server, [completion(name, seed) for seed in range(4)]) for name in ("light", "heavy")
    }
    before = turns(server)

    def enough() -> bool:
        return all(count - before[name] >= 4 for name, count in turns(server).items())

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda crowd: crowd.run(clients=4, seconds=400, enough=enough), crowds.values()))
    counts = {name: count - before[name] for name, count in turns(server).items()}
    assert not any(crowd.wrong for crowd in crowds.values())
    assert min(counts.values()) >= 4
    assert abs(counts["light"] - counts["heavy"]) <= 1  # each has its turn
    light, heavy = (spells(server, name)[-4:] for name in ("light", "heavy"))
    assert median(heavy) > 1.2 * median(light), (light, heavy)
    ended(server)


def test_models_in_turn_leave_no_memory_behind(tmp_path: Path, tiny_model: Callable[..., str]) -> None:
    path = tiny_model()
    names = [f"m{number}" for number in range(10)]  # more than are kept
    models = [entry(name, path, {"skip_tokenizer_init": True}) for name in names]
    file = listed(tmp_path, *models)
    server = start(**OPTIONS, models_file=file, models_memory=1, models_max=1)
    first, *_, last = rounds(server, names, 3)
    assert last[0] <= first[0] * 1.1, (first, last)
    assert last[1] <= 60 * MB + 8 * MB  # with its KV cache
    ended(server)


def test_an_engine_killed_in_its_turn_harms_its_own_requests_alone(
    tmp_path: Path, tiny_model: Callable[..., str]
) -> None:
    names = ("a", "b")
    models = [
        entry(name, tiny_model(max_position_embeddings=4096), {"skip_tokenizer_init": True}) for name in names
    ]
    server = start(**OPTIONS, models_file=listed(tmp_path, *models), models_memory=1)
    server.post("/v1/completions", completion("a").body)
    (engine, _) = children(server, 2)
    crowd = Crowd(server, [completion("b", seed) for seed in range(4)])
    found: list[httpx.Response] = []
    long = completion("a", max_tokens=4000).body
    asked = threading.Thread(target=lambda: found.append(server.post("/v1/completions", long, timeout=120)))
    with stopped(engine):  # a runs as long as it must, however fast the machine is
        asked.start()
        wait_until(lambda: counted(server) == [(1, 0), (0, 0)])
        os.kill(engine, signal.SIGKILL)
    crowd.run(clients=3, seconds=400, most=30)
    asked.join()
    assert crowd.wrong == []
    assert found[0].status_code == 500
    assert found[0].json()["error"]["type"] == "engine_error"
    again = server.post("/v1/completions", completion("a").body)
    while again.status_code == 503:
        again = server.post("/v1/completions", completion("a").body)
    assert again.status_code == 200
    with server.client as client:
        assert 'quire:engine_restarts_total{engine="0",model_name="a"} 1.0' in client.get("/metrics").text
    ended(server)
