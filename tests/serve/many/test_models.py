"""Several models behind one address: answers like those of single servers, switches, states, pins, bad input."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.commands import serve as command
from quire.config import EngineConfig
from quire.engine.directory import SHIPPED_MODEL
from quire.errors import ConfigError
from quire.serve.many import server as several
from quire.serve.many.entries import configured, read_entries
from quire.serve.options import ServerConfig
from quire.weights.hub import ASSETS
from tests.serve.many.crowd import MB, cards, children, counted, entry, listed
from tests.serve.running import Server, start
from tests.waiting import stopped, wait_until

MAKER = "quire.client.start"
OPTIONS = {"maker": MAKER, "model": "", "threads": 1, "skip_tokenizer_init": True}


def body(model: str | None, **more: Any) -> dict[str, Any]:
    asked = {
        "prompt": [3, 1, 4, 1, 5],
        "max_tokens": 12,
        "temperature": 1,
        "seed": 7,
        "return_token_ids": True,
    }
    return {**asked, **({} if model is None else {"model": model}), **more}


def tokens(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def unload(server: Server, name: str) -> None:
    assert server.post("/v1/models/unload", {"model": name}).status_code == 200
    wait_until(lambda: states(server)[name] == "unloaded")


def states(server: Server) -> dict[str, str]:
    return {card["id"]: card["state"] for card in cards(server)}


@pytest.fixture(scope="module")
def paths(tiny_model: Callable[..., str]) -> dict[str, str]:
    return {"a": tiny_model(), "b": tiny_model("qwen2"), "c": tiny_model("gemma2")}


@pytest.fixture(scope="module")
def server(paths: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Room for one and a half models; a third one is no model at all when it is loaded."""
    models = [entry(name, paths[name]) for name in "ab"]
    models[0]["aliases"] = ["first"]
    file = listed(tmp_path_factory.mktemp("many"), *models)
    running = start(**OPTIONS, models_file=file, models_memory=0.11, sse_keep_alive_interval=0.01)
    yield running
    assert running.stop() == 0, running.log
    assert "unexpected error" not in running.log, running.log


def test_models_that_do_not_fit_together_answer_in_turn_like_single_servers(
    server: Server, paths: dict[str, str]
) -> None:
    alone = {}
    for name in "ab":
        single = start(**{**OPTIONS, "model": paths[name]}, kv_cache_memory_bytes=8 * MB)
        alone[name] = tokens(single.post("/v1/completions", body(None)))
        single.stop()
    for name in "abab":
        assert tokens(server.post("/v1/completions", body(name))) == alone[name]
        assert sorted(states(server).values()) == ["ready", "unloaded"]
    assert tokens(server.post("/v1/completions", body("first"))) == alone["a"]
    assert alone["a"] != alone["b"]


def test_a_busy_server_aborts_nothing_and_serves_both(server: Server) -> None:
    def ask(number: int) -> list[int]:
        return tokens(server.post("/v1/completions", body("ab"[number % 2], seed=number % 2)))

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(24)))
    assert all(answer == found[number % 2] for number, answer in enumerate(found))


def test_a_stream_that_waits_is_kept_alive(server: Server) -> None:
    for name in "ab":
        with (
            server.client as client,
            client.stream("POST", "/v1/completions", json=body(name, stream=True)) as got,
        ):
            text = got.read().decode()
        assert text.rstrip().endswith("data: [DONE]")
    assert text.startswith(": keep-alive")
    server.post("/v1/completions", body("a"))
    wrong = server.post("/v1/completions", body("b", stream=True, max_tokens=-1)).text
    assert wrong.startswith(": keep-alive")
    assert json.loads(wrong.split("data: ")[1])["error"]["param"] == "max_tokens"
    assert wrong.endswith("data: [DONE]\n\n")


def test_clients_that_leave_give_up_their_place(server: Server) -> None:
    server.post("/v1/completions", body("a"))
    engine, _ = children(server, 2)
    with ThreadPoolExecutor(1) as pool:
        with stopped(engine):
            answer = pool.submit(server.post, "/v1/completions", body("a"))
            wait_until(lambda: counted(server) == [(1, 0), (0, 0)])
            for _ in range(3):
                with pytest.raises(httpx.TimeoutException):
                    server.post("/v1/completions", body("b"), timeout=0.3)
            wait_until(lambda: counted(server) == [(1, 0), (0, 0)])
        assert tokens(answer.result())
    assert tokens(server.post("/v1/completions", body("b")))


def test_switches_leave_nothing_behind(server: Server) -> None:
    def switch(times: int) -> None:
        for _ in range(times):
            for name in "ab":
                server.post("/v1/completions", body(name))

    def count() -> int:
        return len(os.listdir(f"/proc/{server.process.pid}/fd"))

    switch(2)
    before = count()
    switch(4)
    wait_until(lambda: count() <= before + 3)


def test_the_process_that_waits_for_a_model_may_die(server: Server) -> None:
    server.post("/v1/completions", body("a"))
    _, spare = children(server, 2)
    os.kill(spare, signal.SIGKILL)
    assert tokens(server.post("/v1/completions", body("b")))
    engine, other = children(server, 2)
    assert spare not in (engine, other)


def test_files_that_changed_are_read_again(tmp_path: Path) -> None:
    shutil.copytree(ASSETS / SHIPPED_MODEL, tmp_path / "model")
    file = listed(tmp_path, entry("a", str(tmp_path / "model")))
    running = start(maker=MAKER, model="", threads=1, models_file=file, models_memory=1)

    def prompt_tokens() -> int:
        chat = {"model": "a", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        found: int = running.post("/v1/chat/completions", chat).json()["usage"]["prompt_tokens"]
        unload(running, "a")
        return found

    first = prompt_tokens()
    assert prompt_tokens() == first
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}{{ 'word ' * 50 }}")
    assert prompt_tokens() >= 50 > first
    assert running.stop() == 0, running.log


def test_waits_are_bounded_and_idle_models_leave(paths: dict[str, str], tmp_path: Path) -> None:
    file = listed(tmp_path, entry("a", paths["a"]))
    running = start(**OPTIONS, models_file=file, models_wait=0.1, models_idle=0.5, models_memory=1)
    running.post("/v1/models/load", {"model": "a"})
    assert running.lines_with(": loaded a")
    assert running.lines_with(": unloaded a")
    with stopped(*children(running, 1)):  # the next load takes longer than that, however fast the machine is
        late = running.post("/v1/completions", body("a"))
    assert late.status_code == 503
    assert late.headers["retry-after"]
    wait_until(lambda: len([line for line in running.lines if ": unloaded a" in line]) == 2)
    wait_until(lambda: states(running) == {"a": "unloaded"})
    assert running.stop() == 0, running.log


def test_the_example_of_the_docs_starts(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "scale.md").read_text()
    (example,) = re.findall(r"```yaml\n(models:.*?)```", text, re.DOTALL)
    (tmp_path / "models.yaml").write_text(example)
    config = ServerConfig(port=0, models_file=str(tmp_path / "models.yaml"), models_memory=2, check=True)
    assert asyncio.run(several.serve(EngineConfig(), config, MAKER)) == 0


def test_bodies_name_a_model(server: Server) -> None:
    none = server.post("/v1/completions", body(None))
    assert none.status_code == 400
    assert none.json()["error"]["param"] == "model"
    other = server.post("/v1/completions", body("z"))
    assert other.status_code == 404
    assert "this server has a, b" in other.json()["error"]["message"]
    assert (
        server.post(
            "/v1/completions", None, content=b"{", headers={"content-type": "application/json"}
        ).status_code
        == 400
    )
    assert server.post("/v1/completions", [1]).status_code == 400


def test_operators_load_unload_and_pin(server: Server) -> None:
    assert server.post("/v1/models/load", {"model": "a"}).json()["state"] == "ready"
    refused = server.post("/v1/models/pin", {"model": "a"})
    assert refused.status_code == 400
    assert "finds no room" in refused.json()["error"]["message"]
    unload(server, "a")
    assert server.post("/v1/models/load", {"model": "z"}).status_code == 404
    assert server.post("/v1/models/load", {"name": "a"}).status_code == 400


def scraped(server: Server, query: str = "") -> dict[tuple[str, str | None], float]:
    """Samples of a scrape by name and model; those of other labels are added up."""
    with server.client as client:
        text = client.get(f"/metrics{query}").text
    found: dict[tuple[str, str | None], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, sample.labels.get("model_name")
            found[key] = found.get(key, 0.0) + sample.value
    return found


def test_one_scrape_has_the_metrics_of_all_models(server: Server) -> None:
    server.post("/v1/completions", body("a"))
    before = scraped(server)
    for name in "bab":  # each is unloaded in between
        server.post("/v1/completions", body(name, max_tokens=3, ignore_eos=True))
    after = scraped(server)
    for name, count in (("a", 1), ("b", 2)):
        more = {key[0]: value - before.get(key, 0.0) for key, value in after.items() if key[1] == name}
        assert more["quire:generation_tokens_total"] == 3 * count
        assert more["quire:prompt_tokens_total"] == 5 * count
        assert more["quire:prefix_cache_queries_total"] > 0  # the engine's own counter, over two engines
        assert more["http_requests_total"] == count
        assert after["quire:model_loaded", name] == (name == "b")
    assert after["quire_engine_process_resident_memory_bytes", "b"] > MB
    assert {name for name, model in after if model is None} == {
        name for name, _ in after if name.startswith(("process_", "python_", "quire:memory_"))
    } - {"quire:memory_refusals_total"}
    assert {model for _, model in scraped(server, "?model=a")} == {"a", None}


def test_a_model_that_fails_harms_no_other(paths: dict[str, str], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in Path(paths["b"]).iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    file = listed(tmp_path, entry("good", paths["a"], pin=True), entry("bad", str(broken)))
    running = start(
        **OPTIONS,
        models_file=file,
        admin_api_key=["root"],
        api_key=["user"],
        models_idle=0.5,
        models_memory=1,
    )
    user, root = ({"headers": {"authorization": f"Bearer {key}"}} for key in ("user", "root"))
    for weights in broken.glob("*.safetensors"):
        weights.write_bytes(weights.read_bytes()[:100])
    bad = running.post("/v1/completions", body("bad"), **user)
    assert bad.status_code == 500
    assert bad.json()["error"]["code"] == "model_not_loaded"
    assert str(broken) not in bad.text
    assert len(tokens(running.post("/v1/completions", body("good"), **user))) == 12
    assert running.post("/v1/models/load", {"model": "bad"}, **user).status_code == 403
    assert running.post("/v1/completions", body("good")).status_code == 401
    shown = {}
    for name, options in (("user", user), ("root", root)):
        with running.client as client:
            shown[name] = client.get("/v1/models/bad", **options).json()
    assert shown["user"]["state"] == "failed"
    assert shown["user"].get("error") is None
    assert shown["root"]["error"]
    time.sleep(1)
    with running.client as client:
        assert client.get("/v1/models/good", **user).json()["state"] == "ready"  # pinned, though idle
    assert running.stop() == 0, running.log


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models: [{name: a, path: PATH, pinn: true}]", "unknown word 'pinn'; did you mean pin?"),
        ("models: [{name: a, path: PATH}, {name: a, path: PATH}]", "two models have the name 'a'"),
        (
            "models: [{name: a, path: PATH}, {name: b, path: PATH, aliases: [a]}]",
            "two models have the name 'a'",
        ),
        ("models: [{name: a, path: PATH, options: {max_model_length: 3}}]", "did you mean max_model_len?"),
        ("models: [{name: a, path: PATH, options: {port: 3}}]", "port is an option of the whole server"),
        ("models: [{name: a, path: PATH, options: {block_size: many}}]", "block_size"),
        ("models: [{name: a, path: PATH, weight: 0}]", "weight must be from 0.01 to 100"),
        ("models: [{name: a}]", "needs a path"),
        ("models: &x [*x]", "write each model out"),
        ("models: []", "list 0 models"),
        ("models: [", "cannot be read"),
        ("- {name: a, path: /nowhere}", "model a: "),
        ("- {name: a, path: PATH, options: {kv_cache_memory_bytes: 900000000}}", "model a: "),
    ],
)
def test_bad_input_is_one_line(text: str, said: str, paths: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text(text.replace("PATH", paths["a"]))
    config = ServerConfig(port=0, models_file=str(tmp_path / "models.yaml"), models_memory=0.2)
    with pytest.raises(ConfigError) as refused:
        asyncio.run(several.serve(EngineConfig(), config, MAKER))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"models_dir": "empty"}, "list 0 models"),
        ({"models_dir": "absent"}, "cannot be read"),
        ({"models_file": "absent.yaml"}, "cannot be read"),
        ({"models_dir": "models", "served_model_name": ("x",)}, "leave out --served-model-name"),
        ({"models_dir": "models", "router_api_key": ("x",)}, "leave out --router-api-key"),
        ({"models_dir": "models", "data_parallel_size": 2}, "leave out --data-parallel-size"),
        ({"models_preset": "absent.ini"}, "cannot be read"),
        ({"models_dir": "models", "models_memory": 0.01}, "a"),
        ({"models_max": 2}, "--models-max needs --models"),
        ({"models_turn": 1.0}, "--models-turn needs --models"),
    ],
)
def test_options_that_list_models(options: dict[str, Any], said: str, folder: Path) -> None:
    given = {k: str(folder / v) if isinstance(v, str) else v for k, v in options.items()}
    with pytest.raises(ConfigError, match=re.escape(said)):
        command.run(EngineConfig(), ServerConfig(port=0, **given), ())


@pytest.fixture
def folder(paths: dict[str, str], tmp_path: Path) -> Path:
    (tmp_path / "empty").mkdir()
    (tmp_path / "models").mkdir()
    for name in "ab":
        (tmp_path / "models" / name).symlink_to(paths[name])
    return tmp_path


PRESET = """
version = 1
[*]
c = 512   ; of all models that say nothing else
n-gpu-layers = 99
jinja = true
temp = 0.7
parallel = -1

[a]
ctx-size = 64 # in place of c
alias = first, x y
load-on-startup = true
LLAMA_ARG_N_PARALLEL = 3
LLAMA_ARG_CTX_SIZE = 32
top-k = 5
ctk = q8_0
no-mmap = 1

[b]
model = PATH/models/b
max-num-seqs = 2
ctx-size = 0

[ggml-org/some-GGUF:Q8_0]
"""


def test_presets_of_llama_cpp_list_models(folder: Path) -> None:
    (folder / "models.ini").write_text(PRESET.replace("PATH", str(folder)))
    config = ServerConfig(models_dir=str(folder / "models"), models_preset=str(folder / "models.ini"))
    a, b, c = read_entries(config)
    assert (a.name, a.path, a.aliases, a.start) == ("a", f"{folder}/models/a", ("first", "x y"), True)
    assert a.options == {
        "max_model_len": 32,
        "max_num_seqs": 3,
        "kv_cache_dtype": "int8",
        "override_generation_config": {"temperature": 0.7, "top_k": 5},
    }
    assert (b.name, b.path, b.start) == ("b", f"{folder}/models/b", False)
    assert b.options == {"max_num_seqs": 2, "override_generation_config": {"temperature": 0.7}}
    assert (c.name, c.path) == ("ggml-org/some-GGUF:Q8_0",) * 2
    for one in (a, b):
        assert configured(one, EngineConfig(), config)[0].model.generation_changes["temperature"] == 0.7


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mmproj = vision.gguf", "[a]: mmproj = vision.gguf has no meaning here"),
        ("chat-template = chatml", "chat-template = chatml has no meaning here"),
        ("ctx-sizes = 5", "did you mean"),
        ("ctx-size = many", "[a]: ctx-size "),
        ("temp = hot", "[a]: temp "),
        ("port = 8080", "[a]: port "),
        ("[a", "cannot be read"),
        ("ctx-size", "cannot be read"),
        ("alias = b\n[b]", "two models have the name 'b'"),
    ],
)
def test_words_of_a_preset_that_mean_nothing_are_named(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "models.ini").write_text(f"[a]\n{text}\n")
    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        read_entries(ServerConfig(models_preset=str(tmp_path / "models.ini")))
    assert "\n" not in str(refused.value)


def test_a_directory_lists_models(folder: Path) -> None:
    found = read_entries(ServerConfig(models_dir=str(folder / "models")))
    assert [one.name for one in found] == ["a", "b"]
