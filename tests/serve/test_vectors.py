"""/pooling, /classify, /score, /rerank and embeddings of several sizes: the scripted core, and a real classifier."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from quire import LLM, PoolingParams
from quire.config import EngineConfig
from quire.errors import ConfigError
from tests.model.test_encoders import SIZES, write_tokenizer
from tests.serve import scripted
from tests.serve.running import Server, start

REAL = "quire.client.start"


def post(server: Server, path: str, **body: Any) -> Any:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(server: Server, path: str, **body: Any) -> Any:
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def vector(text: str) -> Any:
    return np.array(scripted.embed(list(text.encode()), "last"))


def test_embeddings_can_be_shortened(server: Server) -> None:
    short = post(server, "/v1/embeddings", input="one", dimensions=2)["data"][0]["embedding"]
    expected = vector("one")[:2]
    assert short == pytest.approx(expected / np.linalg.norm(expected))
    assert refusal(server, "/v1/embeddings", input="one", dimensions=5)["param"] == "dimensions"


def test_what_cannot_be_made_a_vector_is_refused(server: Server) -> None:
    for path in ("/v1/embeddings", "/pooling"):
        assert refusal(server, path, input="")["param"] == "input"
        assert refusal(server, path, input=["a", ""])["param"] == "input"
        longer = refusal(server, path, input="a", truncate_prompt_tokens=scripted.MAX_LEN + 1)
        assert longer["param"] == "truncate_prompt_tokens"
        post(server, path, input="a", truncate_prompt_tokens=scripted.MAX_LEN)


@pytest.mark.parametrize(("name", "kind"), [("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")])
def test_vectors_of_bytes(server: Server, name: str, kind: str) -> None:
    body = {"input": "one", "encoding_format": "bytes_only", "embed_dtype": name}
    data = server.post("/v1/embeddings", body).content
    numbers = np.frombuffer(data, getattr(ml_dtypes, kind)).astype(np.float32)
    np.testing.assert_allclose(numbers, vector("one"), atol=0.1)


def test_no_limit_of_a_document(server: Server) -> None:
    whole = post(server, "/rerank", query="one", documents=["two", "three"])["results"]
    zero = post(server, "/rerank", query="one", documents=["two", "three"], max_tokens_per_doc=0)["results"]
    assert zero == whole


def test_pooling_gives_the_vector(server: Server) -> None:
    answer = post(server, "/pooling", input=["one", "two"])
    assert [item["data"] for item in answer["data"]] == [
        pytest.approx(vector(text)) for text in ("one", "two")
    ]
    assert answer["usage"]["prompt_tokens"] == 6
    assert isinstance(post(server, "/pooling", input="one", encoding_format="base64")["data"][0]["data"], str)


def test_pooling_gives_the_vectors_of_tokens(server: Server) -> None:
    answer = post(server, "/pooling", input=["one", "a"], pooling="all")
    for item, text in zip(answer["data"], ("one", "a"), strict=True):
        np.testing.assert_allclose(item["data"], [vector(letter) for letter in text])
    packed = server.post("/pooling", {"input": "one", "pooling": "all", "encoding_format": "bytes"})
    shape = json.loads(packed.headers["metadata"])["data"][0]["shape"]
    rows = np.frombuffer(packed.content, np.float32).reshape(shape)
    np.testing.assert_allclose(rows, [vector(letter) for letter in "one"], rtol=1e-6)
    assert refusal(server, "/pooling", input="one", pooling="all", dimensions=2)["param"] == "dimensions"
    assert "use /pooling" in refusal(server, "/v1/embeddings", input="one", pooling="all")["message"]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_are_cosines_of_embeddings(path: str, server: Server) -> None:
    answer = post(server, path, text_1="one", text_2=["two", "one", "a longer text"])
    scores = [item["score"] for item in answer["data"]]
    assert scores == [
        pytest.approx(float(vector("one") @ vector(t))) for t in ("two", "one", "a longer text")
    ]
    pairs = post(server, path, text_1=["one", "two"], text_2=["two", "two"])
    assert [item["score"] for item in pairs["data"]] == [pytest.approx(scores[0]), pytest.approx(1)]
    assert "cannot be paired" in refusal(server, path, text_1=["a", "b"], text_2=["a", "b", "c"])["message"]
    assert "at least one text" in refusal(server, path, text_1="a", text_2=[])["message"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank_puts_the_best_first(path: str, server: Server) -> None:
    documents = ["something else", "query", "querx"]
    answer = post(server, path, query="query", documents=documents)
    scores = [item["relevance_score"] for item in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert answer["results"][0]["index"] == 1
    assert all(documents[item["index"]] == item["document"]["text"] for item in answer["results"])
    best = post(server, path, query="query", documents=documents, top_n=1, return_documents=False)["results"]
    assert best == [{"index": 1, "relevance_score": scores[0]}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["one", "two"]}),
        ("/pooling", {"input": "one"}),
        ("/score", {"text_1": "one", "text_2": ["one", "two"]}),
        ("/rerank", {"query": "one", "documents": ["one", "two"]}),
        ("/v2/rerank", {"model": "scripted", "query": "one", "documents": ["one", "two"]}),
    ],
)
def test_vectors_and_scores_name_the_class_of_the_server(path: str, body: Any, server: Server) -> None:
    with server.client as http:
        model = http.get("/v1/models").json()["data"][0]
    assert post(server, path, **body)["system_fingerprint"] == model["system_fingerprint"]
    if path != "/pooling":
        return
    packed = server.post(path, {**body, "encoding_format": "bytes"})
    assert json.loads(packed.headers["metadata"])["system_fingerprint"] == model["system_fingerprint"]


def test_the_query_has_two_names_and_needs_one(server: Server) -> None:
    documents = ["one", "two"]
    assert (
        post(server, "/rerank", queries="one", documents=documents)["results"]
        == post(server, "/rerank", query="one", documents=documents)["results"]
    )
    assert refusal(server, "/rerank", documents=documents)["param"] == "query"


def test_tasks_name_what_pooling_makes(server: Server) -> None:
    by_token = post(server, "/pooling", input="one", pooling="all")["data"]
    assert post(server, "/pooling", input="one", task="token_embed")["data"] == by_token
    whole = post(server, "/pooling", input="one")["data"]
    assert all(
        post(server, "/pooling", input="one", task=task)["data"] == whole for task in ("embed", "encode")
    )
    assert refusal(server, "/pooling", input="one", task="classify")["param"] == "task"
    assert refusal(server, "/pooling", input="one", task="token_embed", pooling="mean")["param"] == "task"


SPLITS = json.dumps({"enable_chunked_processing": True, "max_embed_len": 40})


@pytest.fixture(scope="module")
def splitting() -> Iterator[Server]:
    running = start(max_model_len=16, pooler_config=SPLITS)
    yield running
    assert running.stop() == 0


def test_the_options_of_pooling_are_defaults_of_requests(tiny_model: Callable[..., str]) -> None:
    model, prompt = tiny_model(), {"prompt_token_ids": [3, 4, 5]}
    plain = LLM(model, threads=1)
    other = LLM(model, threads=1, pooler_config={"task": "token_embed", "use_activation": False})
    (given,) = other.encode(prompt)
    raw = PoolingParams(task="token_embed", use_activation=False)
    assert np.array(given.outputs.data).shape[0] == 3
    assert given.outputs.data == plain.encode(prompt, raw)[0].outputs.data
    scaled = other.encode(prompt, PoolingParams(use_activation=True))[0].outputs.data
    assert scaled == plain.encode(prompt, PoolingParams(task="token_embed"))[0].outputs.data


def test_a_long_text_is_the_weighted_mean_of_its_parts(splitting: Server) -> None:
    text = "a text of thirty-nine characters in all"
    parts = [text[i : i + 16] for i in range(0, len(text), 16)]
    mean = np.average([vector(part) for part in parts], axis=0, weights=[len(part) for part in parts])
    answer = post(splitting, "/v1/embeddings", input=[text, "short"])
    long, short = (item["embedding"] for item in answer["data"])
    assert long == pytest.approx(mean / np.linalg.norm(mean))
    assert short == pytest.approx(vector("short"))
    assert answer["usage"]["prompt_tokens"] == len(text) + len("short")
    rows = post(splitting, "/pooling", input=text, task="token_embed")["data"][0]["data"]
    np.testing.assert_allclose(rows, [vector(letter) for letter in text])
    assert "at most 40" in refusal(splitting, "/v1/embeddings", input="x" * 41)["message"]
    assert "at most 16" in refusal(splitting, "/score", text_1=text, text_2="b")["message"]


def test_long_texts_offline(tiny_model: Callable[..., str]) -> None:
    model = tiny_model()
    llm = LLM(model, threads=1, max_model_len=8, pooler_config=SPLITS)
    tokens = list(range(3, 22))
    prompts = [{"prompt_token_ids": tokens[i : i + 8]} for i in range(0, 19, 8)]
    parts = [out.outputs.embedding for out in llm.embed(prompts)]
    (whole,) = llm.embed({"prompt_token_ids": tokens})
    mean = np.average(parts, axis=0, weights=[8, 8, 3])
    assert whole.outputs.embedding == pytest.approx(mean / np.linalg.norm(mean))
    assert whole.prompt_token_ids == tokens


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"enable_chunked_processing": 1}, "true or false"),
        ({"enable_chunked_processing": True, "max_embed_len": 0}, "positive number"),
        ({"max_embed_len": 10}, "needs enable_chunked_processing"),
    ],
)
def test_how_texts_are_split_is_checked(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig.from_options(pooler_config=config)


def test_a_model_without_labels_classifies_nothing(server: Server) -> None:
    assert "not a classifier" in refusal(server, "/classify", input="one")["message"]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    """A server of a tiny BERT that scores pairs."""
    directory = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(3)
    model = BertForSequenceClassification(BertConfig(**{**SIZES, "num_labels": 1}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    write_tokenizer(Path(directory))
    running = start(maker=REAL, model=str(directory), served_model_name=["tiny"], threads=2)
    yield running, str(directory)
    assert running.stop() == 0


def test_a_classifier_answers_as_offline(classifier: tuple[Server, str]) -> None:
    server, model = classifier
    llm = LLM(model, threads=1)
    documents = ["the cat", "a b c d", "of and the q " * 9]
    (outcome,) = llm.classify("a b c")
    classified = post(server, "/classify", input="a b c")
    assert classified["system_fingerprint"].startswith("fp_")
    item = classified["data"][0]
    assert item == {
        "index": 0,
        "label": "LABEL_0",
        "probs": outcome.outputs.probs,
        "num_classes": 1,
    }
    expected = [output.outputs.score for output in llm.score("a b", documents)]
    answer = post(server, "/score", text_1="a b", text_2=documents)
    assert [item["score"] for item in answer["data"]] == expected
    ranked = post(server, "/rerank", query="a b", documents=documents, model="tiny")["results"]
    assert [item["index"] for item in ranked] == sorted(range(3), key=lambda i: -expected[i])


def test_a_classifier_writes_and_embeds_nothing(classifier: tuple[Server, str]) -> None:
    server, _ = classifier
    assert "use /classify" in refusal(server, "/v1/embeddings", input="a")["message"]
    assert (
        "makes vectors, not text" in refusal(server, "/v1/completions", prompt="a", model="tiny")["message"]
    )
    logits = post(server, "/pooling", input="a b c", task="classify")["data"][0]["data"]
    assert post(server, "/classify", input="a b c", use_activation=False)["data"][0]["probs"] == logits
    assert refusal(server, "/pooling", input="a", task="embed")["param"] == "task"
    assert "at most 130" in refusal(server, "/classify", input="a " * 200)["message"]
    assert post(server, "/classify", input="a " * 200, truncate_prompt_tokens=-1)["data"][0]["probs"]
    with httpx.Client(base_url=server.url) as client:
        assert client.get("/health").status_code == 200
