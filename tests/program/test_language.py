"""The language against SGLang's own interpreter: the same variables, texts, messages, errors and calls."""

from __future__ import annotations

import builtins
import json
from typing import Any

import pytest

import quire.program as sgl
from quire.errors import RequestError
from quire.program.selection import decide, kept
from tests.program.fake_backend import Backend
from tests.shared import DATA, cases_of, needs

FOLDER = DATA / "beam" / "sgl"


def cases(name: str) -> list[dict[str, Any]]:
    """The oracle's cases; none without the data, which skips their tests."""
    path = FOLDER / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("case", cases_of(FOLDER, cases("choices.jsonl")), ids=lambda case: case["text"])
def test_choices_are_decided_alike(case: dict[str, Any]) -> None:
    rows = [kept(case["text"], [tuple(entry) for entry in row]) for row in case["input_token_logprobs"]]
    assert [len(row) for row in rows] == case["kept"]
    for method, choice in case["decisions"].items():
        decision = decide(method, rows, case["unconditional_token_logprobs"])
        assert case["choices"][decision.index] == choice
        means = decision.meta_info["normalized_prompt_logprobs"]
        assert means == pytest.approx(case["normalized_prompt_logprobs"], abs=1e-5)
    found = decision.meta_info["normalized_unconditional_prompt_logprobs"]
    assert found == pytest.approx(case["normalized_unconditional_prompt_logprobs"], abs=1e-5)


def wrapped(code: str, trace: bool) -> Any:
    space: dict[str, Any] = {"sgl": sgl}
    exec(code, space)
    return sgl.function(space["f"], trace=trace)


def state_of(state: Any) -> dict[str, Any]:
    error = state.error()
    return {
        "text": state.text(),
        "variables": {str(name): value for name, value in state._lane.live.variables.items()},
        "messages": state.messages(),
        "error": error,
        "returned": state.ret_value,
    }


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    error, wanted = found.pop("error"), dict(expected)
    kind = wanted.pop("error")
    assert found == wanted
    assert error is None if kind is None else isinstance(error, getattr(builtins, kind))


@pytest.mark.parametrize("trace", [True, False], ids=["traced", "step by step"])
@pytest.mark.parametrize("case", cases_of(FOLDER, cases("programs.jsonl")), ids=lambda case: case["name"])
def test_programs_do_what_sglang_does(case: dict[str, Any], trace: bool) -> None:
    backend = Backend(FOLDER, case["template"])
    sgl.set_default_backend(backend)
    expected = case["expected"]
    if case["name"] == "image":
        with pytest.raises(RequestError, match="image is not supported"):
            wrapped(case["code"], trace).run()
        return
    if isinstance(expected, dict) and "raises" in expected:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            eval(case["call"], {"f": wrapped(case["code"], trace)})
        assert expected["raises"] in [kind.__name__ for kind in type(caught.value).__mro__]
        assert expected["words"] in str(caught.value)
        return
    found = eval(case["call"], {"f": wrapped(case["code"], trace)})
    if "value" in expected:
        assert found == expected["value"]
        return
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for state, wanted in zip(found, expected, strict=True):
            same(state_of(state), wanted)
    else:
        same(state_of(found), expected)
    calls = [call for call in backend.calls if call[0] != "cache_prefix" or case["name"] == "batch"]
    assert sorted(map(str, calls)) == sorted(map(str, case["calls"]))


STRAIGHT = {
    "text-and-gen", "run-defaults-and-overrides", "n-samples", "unnamed-gen", "select", "select-greedy", "roles",
    "roles-chatml", "fork-gather", "fork-concatenate", "call-subfunction", "error-in-backend", "separate-reasoning",
}  # fmt: skip


@needs(FOLDER)
@pytest.mark.parametrize("name", sorted(STRAIGHT))
def test_a_program_without_decisions_is_one_request(name: str) -> None:
    (case,) = [case for case in cases("programs.jsonl") if case["name"] == name]
    backend = Backend(FOLDER, case["template"])
    sgl.set_default_backend(backend)
    eval(case["call"], {"f": wrapped(case["code"], True)})
    assert backend.num_requests == 1
