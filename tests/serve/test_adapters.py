"""Adapters over HTTP: named as models, loaded and unloaded under load, and only from where they may come."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import LLM, LoRARequest, SamplingParams
from quire.client.metrics import Metrics
from quire.config import EngineConfig
from quire.engine.verbs import LoadAdapter, UnloadAdapter
from quire.errors import ConfigError, EngineError
from quire.serve import adapters as module
from quire.serve.adapters import Adapters, LoraModule, read_modules
from quire.serve.options import ServerConfig, split_options
from tests.serve.running import Server, start

ASSETS = Path(__file__).parents[2] / "src" / "quire" / "assets"
SHIPPED = {"tale": "quire-stories-lora-oldtale", "bard": "quire-stories-lora-shakespeare"}
KEY = {"Authorization": "Bearer secret"}
PROMPT, TOKENS = "Once upon a time", 12


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("root")
    for name, folder in SHIPPED.items():
        shutil.copytree(ASSETS / folder, path / name)
    (path / "link").symlink_to(ASSETS)
    return path


@pytest.fixture(scope="module", params=[1, 2], ids=["whole", "two stages"])
def server(request: pytest.FixtureRequest, root: Path) -> Iterator[Server]:
    running = start(
        maker="quire.client.start",
        model="",
        max_model_len=128,
        threads=2 // request.param,
        pipeline_parallel_size=request.param,
        enable_lora=True,
        max_loras=2,
        max_cpu_loras=2,
        lora_modules=["tale=quire-stories-lora-oldtale"],
        allow_runtime_lora=True,
        lora_root=[str(root)],
        api_key=["reader"],
        admin_api_key=["secret"],
    )
    yield running
    running.stop()


@pytest.fixture(scope="module")
def wanted() -> dict[str, str]:
    """The greedy text of the base and of each adapter."""
    llm, params = LLM(enable_lora=True, max_model_len=128), SamplingParams(temperature=0, max_tokens=TOKENS)
    requests = [None, *(LoRARequest(name, i + 1, path) for i, (name, path) in enumerate(SHIPPED.items()))]
    outputs = llm.generate([PROMPT] * 3, params, lora_request=requests, use_tqdm=False)
    return dict(zip(("quire-stories", *SHIPPED), (o.outputs[0].text for o in outputs), strict=True))


def complete(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, **more}


def test_an_adapter_is_a_model_with_a_parent(server: Server, wanted: dict[str, str]) -> None:
    assert len(set(wanted.values())) == 3
    with httpx.Client(base_url=server.url, headers=KEY, timeout=60) as client:
        cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
        assert cards["tale"]["parent"] == "quire-stories"
        assert cards["tale"]["root"] == "quire-stories-lora-oldtale"
        assert client.get("/v1/models/tale").json() == cards["tale"]
        for model in ("quire-stories", "tale"):
            answer = client.post("/v1/completions", json=complete(model)).json()
            assert (answer["model"], answer["choices"][0]["text"]) == (model, wanted[model])
        assert client.post("/v1/completions", json=complete("bard")).status_code == 404
        assert client.post("/v1/embeddings", json={"model": "bard", "input": "x"}).status_code == 404
        page = client.get("/metrics").text
        assert 'lora_requests_info{max_lora="2"' in page


def test_vectors_and_scores_are_those_of_the_adapter(server: Server) -> None:
    """Each endpoint that makes vectors takes the adapter as its model, and answers as the engine does in Python."""
    texts = ["Once upon a time", "There was a king"]
    llm = LLM(enable_lora=True, max_model_len=128)
    tale = LoRARequest("tale", 1, SHIPPED["tale"])

    def close(found: list[float], wanted: list[float]) -> bool:
        return found == pytest.approx(wanted, abs=1e-5)

    with httpx.Client(base_url=server.url, headers=KEY, timeout=60) as client:
        for model, adapter in (("quire-stories", None), ("tale", tale)):
            wanted = [one.outputs.embedding for one in llm.embed(texts, use_tqdm=False, lora_request=adapter)]
            answer = client.post("/v1/embeddings", json={"model": model, "input": texts}).json()
            assert answer["model"] == model
            assert all(map(close, [one["embedding"] for one in answer["data"]], wanted))
            answer = client.post("/pooling", json={"model": model, "input": texts}).json()
            assert all(map(close, [one["data"] for one in answer["data"]], wanted))
            (score,) = llm.score(*texts, use_tqdm=False, lora_request=adapter)
            body = {"model": model, "text_1": texts[0], "text_2": texts[1]}
            found = client.post("/score", json=body).json()["data"][0]["score"]
            assert found == pytest.approx(score.outputs.score, abs=1e-5)
            body = {"model": model, "query": texts[0], "documents": texts[1:]}
            found = client.post("/rerank", json=body).json()["results"][0]["relevance_score"]
            assert found == pytest.approx(score.outputs.score, abs=1e-5)
        embeddings = [
            client.post("/v1/embeddings", json={"model": model, "input": texts}).json()["data"]
            for model in ("quire-stories", "tale")
        ]
        assert embeddings[0] != embeddings[1]


def test_loading_needs_a_key_a_root_and_a_free_name(server: Server, root: Path) -> None:
    def load(name: str, path: str, headers: dict[str, str] = KEY, **more: Any) -> httpx.Response:
        body = {"lora_name": name, "lora_path": path, **more}
        return httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, headers=headers, timeout=60)

    assert load("x", str(root / "bard"), {}).status_code == 401
    for path in (
        str(ASSETS / SHIPPED["bard"]),
        str(root / ".." / "other"),
        str(root / "link"),
        "/etc",
        "../x",
    ):
        assert load("x", path).status_code == 404, path
    assert load("x", str(root)).status_code == 400  # no adapter
    assert load("quire-stories", str(root / "bard")).status_code == 400
    assert load("", str(root / "bard")).status_code == 400
    assert load("x", "").status_code == 400
    done = load("x", str(root / "bard"))
    assert (done.status_code, done.text) == (200, "Success: LoRA adapter 'x' added successfully.")
    assert load("x", str(root / "tale")).status_code == 400
    assert load("x", str(root / "tale"), load_inplace=True).status_code == 200
    for status in (200, 404):
        gone = httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": "x"}, headers=KEY)
        assert gone.status_code == status


def test_adapters_come_and_go_under_64_clients(server: Server, root: Path, wanted: dict[str, str]) -> None:
    """Each answer is that of its adapter, or says that the model is not there; nothing is lost and nothing hangs."""
    counts = {200: 0, 404: 0}

    async def client(http: httpx.AsyncClient, number: int) -> None:
        rng = random.Random(number)
        for _ in range(4):
            model = rng.choice(("quire-stories", "tale", "a", "b"))
            answer = await http.post("/v1/completions", json=complete(model, stream=False))
            counts[answer.status_code] += 1
            if answer.status_code == 200:
                text = wanted[{"a": "bard", "b": "tale"}.get(model, model)]
                assert answer.json()["choices"][0]["text"] == text

    async def operator(http: httpx.AsyncClient, name: str, path: str, done: asyncio.Event) -> None:
        while not done.is_set():
            body = {"lora_name": name, "lora_path": path}
            assert (await http.post("/v1/load_lora_adapter", json=body)).status_code == 200
            await asyncio.sleep(0.05)
            assert (await http.post("/v1/unload_lora_adapter", json={"lora_name": name})).status_code == 200

    async def run() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, headers=KEY, timeout=60, limits=limits) as http:
            done = asyncio.Event()
            operators = [
                asyncio.create_task(operator(http, "a", str(root / "bard"), done)),
                asyncio.create_task(operator(http, "b", str(root / "tale"), done)),
            ]
            await asyncio.gather(*(client(http, number) for number in range(64)))
            done.set()
            await asyncio.gather(*operators)

    asyncio.run(run())
    assert sum(counts.values()) == 256
    assert counts[200] > 100
    with httpx.Client(base_url=server.url, headers=KEY) as client_:
        stats = client_.get("/stats").json()
        assert client_.get("/health").status_code == 200
    assert stats["num_running"] == stats["num_waiting"] == 0


def test_lora_modules_are_names_or_json() -> None:
    found = read_modules(
        ("a=b/c", '{"name": "d", "path": "e", "base_model_name": "f"}', '[{"name":"g","path":"h"}]')
    )
    assert found == [LoraModule("a", "b/c"), LoraModule("d", "e", "f"), LoraModule("g", "h")]
    (one,) = read_modules(('{"name": "a", "path": "b", "is_3d_lora_weight": false}',))
    assert (one.name, one.path) == ("a", "b")


@pytest.mark.parametrize(
    "given", ["a", "=b", "a=", "{", '{"name": "a"}', '{"name": "a", "path": "b", "c": 1}', "[1]"]
)
def test_lora_modules_that_are_neither_are_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="--lora-modules"):
        read_modules((given,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allow_runtime_lora": True, "enable_lora": True}, "needs --admin-api-key"),
        ({"max_loras": 4, "max_cpu_loras": 3}, "at least --max-loras 4"),
        ({"max_lora_rank": 0}, "--max-lora-rank must be at least 1"),
    ],
)
def test_options_that_disagree_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_options(options)


def test_the_owner_with_most_names_loses_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that cannot be loaded leave nothing; an operator's stay."""
    monkeypatch.setattr(module, "MOST_NAMES", 6)

    class Engine:
        config = EngineConfig.from_options(enable_lora=True)
        metrics = Metrics("m")

        async def do(self, verb: LoadAdapter | UnloadAdapter) -> str:
            if isinstance(verb, LoadAdapter) and verb.path.endswith("broken"):
                raise EngineError("it is broken")
            return verb.path if isinstance(verb, LoadAdapter) else ""

    async def run() -> None:
        adapters = Adapters(Engine(), ServerConfig(lora_root=(str(tmp_path),)))  # type: ignore[arg-type]

        async def load(name: str, owner: str) -> None:
            (tmp_path / name).mkdir()
            (tmp_path / name / "adapter_config.json").write_text("{}")
            await adapters.load(name, str(tmp_path / name), owner=owner, trusted=not owner)

        for name, owner in (("tale", ""), ("b1", "b"), ("b2", "b"), *((f"a{i}", "a") for i in range(30))):
            await load(name, owner)
        for i in range(10):
            with pytest.raises(EngineError):
                await load(f"{i}broken", "a")
        assert [one.name for one in adapters.loaded.all] == ["tale", "b1", "b2", "a26", "a27", "a28", "a29"]
        assert not adapters._locks

    asyncio.run(run())


@pytest.fixture(scope="module")
def by_name(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose requests load adapters of a directory; one more lies beside it."""
    place = tmp_path_factory.mktemp("adapters")
    for name, folder in SHIPPED.items():
        shutil.copytree(ASSETS / folder, place / "dir" / name)
    shutil.copytree(ASSETS / SHIPPED["bard"], place / "beside")
    (place / "dir" / "link").symlink_to(place / "beside")
    (place / "dir" / "empty").mkdir()
    (place / "dir" / "broken").mkdir()
    (place / "dir" / "broken" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    running = start(
        maker="quire.client.start",
        model="",
        max_model_len=128,
        threads=2,
        enable_lora=True,
        max_loras=1,
        lora_dir=str(place / "dir"),
    )
    yield running
    running.stop()


def test_requests_load_the_adapters_that_they_name(by_name: Server, wanted: dict[str, str]) -> None:
    """The first requests come at once; with one slot each adapter makes room for the other."""

    async def ask(http: httpx.AsyncClient, model: str) -> tuple[str, int, Any]:
        answer = await http.post("/v1/completions", json=complete(model))
        return model, answer.status_code, answer.json()

    async def run() -> list[tuple[str, int, Any]]:
        async with httpx.AsyncClient(base_url=by_name.url, timeout=60) as http:
            return await asyncio.gather(
                *(ask(http, model) for model in ["tale", "bard", "quire-stories"] * 4)
            )

    for model, status, body in asyncio.run(run()):
        assert status == 200, body
        assert body["choices"][0]["text"] == wanted[model]
    with httpx.Client(base_url=by_name.url, timeout=60) as client:
        body = {"model": "tale", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        for path in ("/v1/messages", "/v1/chat/completions"):
            assert client.post(path, json=body).json()["model"] == "tale"
        listed = {card["id"]: card["parent"] for card in client.get("/v1/models").json()["data"]}
        assert listed == {"quire-stories": None, "tale": "quire-stories", "bard": "quire-stories"}


@pytest.mark.parametrize(
    "name",
    [
        "..",
        ".",
        "",
        "../beside",
        "../dir/tale",
        "tale/",
        "./tale",
        "tale\0",
        "empty",
        "nobody",
        "/etc",
        "a" * 200,
    ],
)
def test_a_name_is_no_path(name: str, by_name: Server) -> None:
    answer = httpx.post(f"{by_name.url}/v1/completions", json=complete(name))
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("name", ["link", "broken"])
def test_what_cannot_be_loaded_is_an_error_of_the_request(name: str, by_name: Server) -> None:
    """A link out of the directory, and a directory without weights."""
    for _ in range(2):
        answer = httpx.post(f"{by_name.url}/v1/completions", json=complete(name))
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["type"]) == ("model", "invalid_request_error")
        assert error["message"].startswith(f"the adapter {name} cannot be loaded")
    assert httpx.get(f"{by_name.url}/health").status_code == 200


def test_a_directory_of_adapters_needs_adapters_and_must_exist(tmp_path: Path) -> None:
    for lora, place, message in ((False, tmp_path, "needs --enable-lora"), (True, tmp_path / "x", "no such")):
        engine, config = split_options({"enable_lora": lora, "lora_dir": str(place)})
        with pytest.raises(ConfigError, match=f"--lora-dir.*{message}"):
            module.check_adapters(engine, config)
