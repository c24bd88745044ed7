"""SGLang's native endpoints, beside OpenAI's on the same server."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from conftest import Installed
from quire_compat.sglang import page
from quire_compat.sglang.calls import Sampling
from quire_compat.sglang.fields import GENERATE, SAMPLING
from tests.serve.running import start

PROMPT = "Once upon a time"
END = 1  # of the sequence
GREEDY = {"max_new_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def http(installed: Installed) -> Iterator[httpx.Client]:
    server = start(maker="quire.client.start", model="", python=installed.python)
    with server.client as client:
        yield client
    assert server.stop() == 0
    assert "unexpected error" not in server.log, server.log


def generate(http: httpx.Client, **body: Any) -> Any:
    answer = http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def complete(http: httpx.Client, **body: Any) -> Any:
    return http.post("/v1/completions", json={"temperature": 0, "max_tokens": 6, **body}).json()


def test_one_text_gives_one_result(http: httpx.Client) -> None:
    found, same = generate(http, text=PROMPT, sampling_params=GREEDY), complete(http, prompt=PROMPT)
    meta = found["meta_info"]
    assert found["text"] == same["choices"][0]["text"]
    assert meta["prompt_tokens"] == same["usage"]["prompt_tokens"]
    assert meta["system_fingerprint"] == same["system_fingerprint"]
    assert meta["completion_tokens"] == len(found["output_ids"]) == 6
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    tokens = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    by_tokens = generate(http, input_ids=tokens, sampling_params=GREEDY)
    assert by_tokens["output_ids"] == found["output_ids"]
    assert by_tokens["meta_info"]["cached_tokens"] > 0


def test_a_list_gives_a_list_with_ids_of_its_own(http: httpx.Client) -> None:
    found = generate(
        http,
        text=[PROMPT, "One day"],
        sampling_params=[{**GREEDY, "n": 2}, {**GREEDY, "max_new_tokens": 2}],
        rid=["a", "b"],
    )
    assert [one["meta_info"]["id"] for one in found] == ["a_0", "a_1", "b"]
    assert [len(one["output_ids"]) for one in found] == [6, 6, 2]
    assert len(generate(http, text=[PROMPT], sampling_params=GREEDY)) == 1


def test_an_output_ends_at_a_text_or_token(http: httpx.Client) -> None:
    whole = generate(http, text=PROMPT, sampling_params=GREEDY)
    stopped = generate(http, text=PROMPT, sampling_params={**GREEDY, "stop": " was"})
    assert whole["text"].startswith(stopped["text"] + " was")
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": " was"}
    kept = generate(http, text=PROMPT, sampling_params={**GREEDY, "stop": " was", "no_stop_trim": True})
    assert kept["text"] == stopped["text"] + " was"
    token = whole["output_ids"][2]
    by_token = generate(http, text=PROMPT, sampling_params={**GREEDY, "stop_token_ids": [token]})
    assert by_token["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}


def test_log_probabilities_are_those_of_completions(http: httpx.Client) -> None:
    body = {"text": PROMPT, "sampling_params": GREEDY, "return_logprob": True}
    found = generate(http, **body, logprob_start_len=1, top_logprobs_num=2, return_text_in_logprobs=True)
    same = complete(http, prompt=PROMPT, echo=True, logprobs=2)["choices"][0]["logprobs"]
    entries = found["meta_info"]["input_token_logprobs"] + found["meta_info"]["output_token_logprobs"]
    assert entries[0][0] is None, "the first position has no log-probability, wherever it is"
    assert [entry[0] for entry in entries[1:]] == pytest.approx(same["token_logprobs"][1:])
    assert [entry[2] for entry in entries] == same["tokens"]
    tops = found["meta_info"]["output_top_logprobs"]
    assert all(len(top) == 2 and top[0][0] >= top[1][0] for top in tops)
    outputs_only = generate(http, **body)["meta_info"]
    assert outputs_only["input_token_logprobs"] == []
    assert len(outputs_only["output_token_logprobs"]) == 6
    asked = generate(http, **body, token_ids_logprob=[5, 7])["meta_info"]["output_token_ids_logprobs"]
    assert [[entry[1] for entry in row] for row in asked] == [[5, 7]] * 6


def test_no_new_tokens_computes_the_prompt_alone(http: httpx.Client) -> None:
    """As SGLang's own client asks for the scores of choices."""
    choices = [f"{PROMPT}{choice}" for choice in (" there", " xylophone")]
    found = generate(
        http, text=choices, sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0
    )
    assert [one["text"] for one in found] == ["", ""]
    assert [one["meta_info"]["completion_tokens"] for one in found] == [0, 0]
    means = []
    for one in found:
        scores = [entry[0] for entry in one["meta_info"]["input_token_logprobs"] if entry[0]]
        means.append(sum(scores) / len(scores))
    assert means[0] > means[1]


def ends_of(http: httpx.Client, chat: bool, **body: Any) -> list[dict[str, Any]]:
    """The choices of a body, and those of its stream with a finish reason, which must tell the same end."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    given = {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": [PROMPT, PROMPT]}
    body = {"temperature": 0, "max_tokens": 6, **given, **body}
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    choices: list[dict[str, Any]] = answer.json()["choices"]
    lines = [line[6:] for line in http.post(path, json={**body, "stream": True}).text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    streamed = [choice for line in lines for choice in json.loads(line)["choices"]]
    last = sorted((one for one in streamed if one.get("finish_reason")), key=lambda one: int(one["index"]))
    assert [one.get("matched_stop") for one in last] == [one["matched_stop"] for one in choices]
    assert [one["finish_reason"] for one in last] == [one["finish_reason"] for one in choices]
    return choices


@pytest.mark.parametrize("chat", [False, True])
def test_choices_tell_what_ended_them(http: httpx.Client, chat: bool) -> None:
    """A stop string, a stop token, the end of the sequence, and the length, which is no match."""
    free = ends_of(http, chat, n=2, return_token_ids=True)
    assert [one["matched_stop"] for one in free] == [None] * len(free)
    token = free[0]["token_ids"][2]
    assert {one["matched_stop"] for one in ends_of(http, chat, stop_token_ids=[token], n=2)} == {token}
    text = (free[0]["message"]["content"] if chat else free[0]["text"]).strip()[2:4]
    assert {one["matched_stop"] for one in ends_of(http, chat, stop=[text])} == {text}
    (ended, *_) = ends_of(http, chat, logit_bias={str(END): 100}, return_token_ids=True)
    assert (ended["stop_reason"], ended["matched_stop"], ended["token_ids"]) == (None, END, [END])


def test_the_best_samples_tell_what_ended_them(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "temperature": 1.5, "seed": 3, "max_tokens": 24, "n": 2, "best_of": 6}
    ends = {"stop_token_ids": [*range(2, 128)], "return_token_ids": True}
    for choice in http.post("/v1/completions", json={**body, **ends}).json()["choices"]:
        ended = choice["finish_reason"] == "stop"
        assert choice["matched_stop"] == (choice["token_ids"][-1] if ended else None)
    scored = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 0, "echo": True})
    assert scored.json()["choices"][0]["matched_stop"] is None


@pytest.mark.parametrize("item_first", [False, True])
@pytest.mark.parametrize("softmax", [False, True])
def test_scores_are_probabilities_of_labels(http: httpx.Client, item_first: bool, softmax: bool) -> None:
    query, items, labels = PROMPT, [" there", " a girl"], [5, 300, 7]
    body = {"query": query, "items": items, "label_token_ids": labels}
    answer = http.post("/v1/score", json={**body, "apply_softmax": softmax, "item_first": item_first})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    for item, scores in zip(items, found["scores"], strict=True):
        prompt = item + query if item_first else query + item
        asked = complete(
            http,
            prompt=prompt,
            max_tokens=1,
            logprobs=0,
            logprob_token_ids=labels,
            return_tokens_as_token_ids=True,
        )
        (top,) = asked["choices"][0]["logprobs"]["top_logprobs"]
        right = [math.exp(top[f"token_id:{label}"]) for label in labels]
        right = [one / sum(right) for one in right] if softmax else right
        assert scores == pytest.approx(right, rel=1e-5)
    ids = [http.post("/tokenize", json={"prompt": query + item}).json()["tokens"] for item in items]
    by_ids = {"query": [], "items": ids, "label_token_ids": labels, "apply_softmax": softmax}
    if not item_first:
        assert http.post("/v1/score", json=by_ids).json()["scores"] == found["scores"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"query": None}, "query"),
        ({"items": None}, "items"),
        ({"items": []}, "items"),
        ({"label_token_ids": None}, "label_token_ids"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [1 << 30]}, "label_token_ids"),
        ({"items": [[1, 2]]}, "items"),
        ({"query": None, "label_token_ids": None, "items": [[1]]}, "items"),
        ({"query": None, "label_token_ids": None}, "text_1"),
    ],
)
def test_a_score_that_lacks_something_is_refused_by_name(http: httpx.Client, change: Any, param: str) -> None:
    body = {"query": PROMPT, "items": [" there"], "label_token_ids": [5], **change}
    answer = http.post("/v1/score", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_pairs_of_texts_are_scored_as_ever(http: httpx.Client) -> None:
    body = {"text_1": PROMPT, "text_2": ["a girl", "a boy"]}
    found, same = (http.post(path, json=body).json() for path in ("/v1/score", "/score"))
    assert found["data"] == same["data"]
    body = {"queries": PROMPT, "items": ["a girl", "a boy"]}
    assert http.post("/v1/score", json=body).json()["data"] == same["data"]


def test_a_list_of_prompts_is_tokenized_to_lists(http: httpx.Client) -> None:
    prompts = [PROMPT, "", "One day"]
    more = {"add_special_tokens": False, "return_token_strs": True}
    alone = [http.post("/tokenize", json={"prompt": one, **more}).json() for one in prompts]
    found = http.post("/tokenize", json={"prompt": prompts, **more}).json()
    for name in ("tokens", "count", "token_strs"):
        assert found[name] == [one[name] for one in alone]
    assert found["max_model_len"] == alone[0]["max_model_len"]
    messages = [{"role": "user", "content": "x"}]
    for wrong in ({"prompt": prompts, "messages": messages}, {}):
        answer = http.post("/tokenize", json=wrong)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prompt"


def test_a_stream_brings_all_text_so_far(http: httpx.Client) -> None:
    whole = generate(http, text=PROMPT, sampling_params=GREEDY)
    answer = http.post("/generate", json={"text": PROMPT, "sampling_params": GREEDY, "stream": True})
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    texts = [one["text"] for one in events]
    assert texts == sorted(texts, key=len)
    assert texts[-1] == whole["text"]
    assert [one["meta_info"]["finish_reason"] for one in events[:-1]] == [None] * (len(events) - 1)
    many = http.post("/generate", json={"text": [PROMPT, "One"], "sampling_params": GREEDY, "stream": True})
    numbers = {json.loads(line[6:])["index"] for line in many.text.split("\n\n")[:-2]}
    assert numbers == {0, 1}


def test_the_output_keeps_to_a_constraint(http: httpx.Client) -> None:
    found = generate(http, text="One day", sampling_params={**GREEDY, "regex": "[a-c]{3}"})
    assert len(found["text"]) == 3
    assert set(found["text"]) <= set("abc")
    answer = http.post("/generate", json={"text": "x", "sampling_params": {"regex": "("}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "sampling_params.regex"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "x", "input_ids": [1]}, "text"),
        ({"text": ["x", "y"], "sampling_params": [GREEDY]}, "sampling_params"),
        ({"text": ["x", "y"], "rid": ["a"]}, "rid"),
        ({"text": "x", "image_data": "y"}, "image_data"),
        ({"text": "x", "session_params": {"id": "s"}}, "session_params"),
        ({"text": "x", "sampling_params": {"stop_regex": "y"}}, "sampling_params.stop_regex"),
        ({"text": "x", "sampling_params": {"max_tokens": 3}}, "sampling_params.max_tokens"),
        ({"text": "x", "sampling_params": {"temprature": 0}}, "sampling_params.temprature"),
        ({"text": "x", "sampling_params": {"regex": "a", "ebnf": "b"}}, "ebnf"),
        ({"text": "x", "sampling_params": {"temperature": -1}}, "temperature"),
        ({"text": "x", "lora_path": "nobody"}, "model"),
        ({"input_ids": [[1], 2]}, "input_ids"),
        ({"input_ids": [100000]}, "prompt"),
        ({"text": "x", "top_logprobs_num": "many"}, "top_logprobs_num"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(http: httpx.Client, body: Any, param: str) -> None:
    answer = http.post("/generate", json=body)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == param


def test_the_server_tells_of_its_model(http: httpx.Client) -> None:
    assert http.get("/get_model_info").json() == http.get("/model_info").json()
    assert http.get("/model_info").json()["is_generation"]


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_flushing_forgets_prefixes(http: httpx.Client, method: str) -> None:
    body = {"text": f"{method} it was a dark and stormy night", "sampling_params": GREEDY}
    generate(http, **body)
    assert generate(http, **body)["meta_info"]["cached_tokens"] > 0
    assert http.request(method, "/flush_cache").status_code == 200
    assert generate(http, **body)["meta_info"]["cached_tokens"] == 0


def serve(installed: Installed, words: str) -> subprocess.CompletedProcess[str]:
    command = [str(installed.python), "-m", "quire.cli", "serve", *words.split()]
    return subprocess.run(command, env=installed.variables, capture_output=True, text=True, timeout=60)


def test_quire_serve_takes_sglangs_flags(installed: Installed) -> None:
    done = serve(
        installed,
        "--model-path= --mem-fraction-static 0.3 --tp 1 --context-length 512 --disable-cuda-graph "
        "--cuda-graph-bs 1 2 --disable-cuda-graph-padding --check",
    )
    assert done.returncode == 0, done.stderr
    assert "--disable-cuda-graph-padding changes nothing" in done.stderr
    assert "ready to serve" in done.stdout
    small = serve(installed, "--model-path= --max-total-tokens 130 --context-length 512 --check")
    assert small.returncode == 0, small.stderr
    assert "--context-length 512 is lowered to the 128 tokens of --max-total-tokens" in small.stderr
    assert "longest request   128 tokens" in small.stdout
    wrong = serve(installed, "--disable-cuda-graph --dp-size 2")
    assert wrong.returncode == 2
    assert "--dp-size 2 is not supported" in wrong.stderr
    twice = serve(installed, "one --model-path two")
    assert twice.returncode == 2
    assert "the model is given twice" in twice.stderr


def test_tables_list_the_fields_of_the_bodies() -> None:
    assert set(GENERATE.taken) == set(GENERATE.body.__struct_fields__)
    assert set(SAMPLING.taken) == set(Sampling.__struct_fields__)
    assert len(GENERATE.names) == len(set(GENERATE.names))


def test_the_page_shows_the_tables() -> None:
    written = (Path(__file__).parents[2] / "docs" / "compat-sglang.md").read_text()
    assert written == page.page(), "run `python -m quire_compat.sglang.page > docs/compat-sglang.md`"
