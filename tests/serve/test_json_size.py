"""Bodies are bounded by what they hold, not only by their bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.serve import bodies
from quire.serve.errors import HttpError
from quire.serve.fields.accept import MAX_UNKNOWN
from quire.serve.openai.texts import MAX_PROMPTS
from tests.serve.running import Server

TEXT = st.text(alphabet='a,:{["\\\né', max_size=8)
VALUES = st.recursive(
    st.one_of(st.none(), st.integers(), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=4)),
    max_leaves=40,
)


def counted(value: Any) -> tuple[int, int]:
    """Commas, and colons with opening brackets, of a value written as JSON."""
    if isinstance(value, dict):
        parts = [counted(item) for item in value.values()]
        return sum(p[0] for p in parts) + max(0, len(value) - 1), sum(p[1] for p in parts) + len(value) + 1
    if isinstance(value, list):
        parts = [counted(item) for item in value]
        return sum(p[0] for p in parts) + max(0, len(value) - 1), sum(p[1] for p in parts) + 1
    return 0, 0


@given(VALUES, st.integers(1, 9))
def test_values_are_counted_outside_of_strings(value: Any, size: int) -> None:
    text = json.dumps(value, ensure_ascii=False).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "_SLICE", size)
        assert bodies._count(text, outside_strings=True) == counted(value)
        many = bodies._count(text)
    assert many[0] >= counted(value)[0]
    assert many[1] >= counted(value)[1]


def test_a_long_text_with_many_commas_is_one_value() -> None:
    bodies.check_values(json.dumps({"prompt": ",:{[" * bodies.MAX_VALUES}).encode())


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"1," * (bodies.MAX_VALUES + 1) + b"1]",
        b"[" + b"{}," * bodies.MAX_CONTAINERS + b"{}]",
        b"[" * (bodies.MAX_CONTAINERS + 1),
        b"{" + b'"a":1,' * bodies.MAX_CONTAINERS + b'"a":1}',
    ],
    ids=["values", "objects", "depth", "members"],
)
def test_too_many_values_are_refused(body: bytes) -> None:
    with pytest.raises(HttpError, match="more than"):
        bodies.check_values(body)


MANY: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}


@pytest.mark.parametrize("path", MANY)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bad_words", ["a"] * 5000),
        ("bad_words", ["a" * 20000] * 5),
        ("stop", ["a" * 70000]),
        ("stop_token_ids", [1] * 2000),
        ("logit_bias", {str(i): 1 for i in range(20000)}),
    ],
)
def test_long_parameters_are_refused_by_name(server: Server, path: str, field: str, value: object) -> None:
    answer = server.post(path, {**MANY[path], field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", {"prompt": ["x"] * 5, "n": 1024}, f"at most {MAX_PROMPTS} samples"),
        (
            "/v1/completions",
            {"prompt": "x", **{f"zqx{i}": 1 for i in range(MAX_UNKNOWN + 1)}},
            "unknown fields",
        ),
        ("/v1/embeddings", {"input": ["x"] * (MAX_PROMPTS + 1)}, f"at most {MAX_PROMPTS}"),
    ],
)
def test_too_much_for_one_call(server: Server, path: str, body: object, message: str) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
