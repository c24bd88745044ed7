"""The instruction sets of 64-bit ARM: `pytest tests/test_aarch64.py --aarch64 PYTHON`, an ARM Python that has Quire.

`packaging/wheels.py --aarch64 --run ROOT` makes one that runs under QEMU.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

PROMPT = "Once upon a time"
KINDS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "int8": {"dtype": "float32", "quantization": "int8", "kv_cache_dtype": "int8"},
    "int4": {"dtype": "float32", "quantization": "int4"},
    "bfloat16": {"dtype": "bfloat16"},
}
ANSWER = f"""
import json, sys
from quire import LLM, SamplingParams

def answer(**options):
    llm = LLM(threads=1, max_model_len=256, **options)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=1)
    output = llm.generate({PROMPT!r}, params, use_tqdm=False)[0].outputs[0]
    return output.token_ids, [at[token].logprob for at, token in zip(output.logprobs, output.token_ids)]
"""
SETS = "import json\nfrom quire._native import available_isas\nprint(json.dumps(available_isas()))"
ALL = f"""{ANSWER}
from quire._native import available_isas
kinds = json.loads(sys.argv[1])
found = {{kind: {{isa: answer(isa=isa, **kinds[kind]) for isa in available_isas()}} for kind in kinds}}
print(json.dumps(found))
"""

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest) -> Run:
    """What a program prints as JSON on an ARM CPU."""
    python = request.config.getoption("aarch64")
    if python is None:
        pytest.skip("needs --aarch64 PYTHON: packaging/wheels.py --aarch64 --run ROOT makes one")

    def output(program: str, *arguments: str, cpu: str = "max") -> Any:
        variables = {**os.environ, "QEMU_CPU": cpu}
        variables.pop("PYTHONPATH", None)
        command = [python, "-c", program, *arguments]
        done = subprocess.run(command, env=variables, check=True, capture_output=True, text=True)
        return json.loads(done.stdout.splitlines()[-1])

    return output


@pytest.fixture(scope="module")
def answers(run: Run) -> dict[str, dict[str, tuple[list[int], list[float]]]]:
    """By kind of weights and instruction set: greedy tokens and their log-probabilities."""
    return run(ALL, json.dumps(KINDS))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("cpu", "sets"),
    [
        ("cortex-a72", ["neon", "scalar"]),
        ("neoverse-n1", ["neon_dot", "neon", "scalar"]),
        ("max", ["neon_bf16", "neon_i8mm", "neon_dot", "neon", "scalar"]),
    ],
)
def test_a_cpu_has_the_sets_of_its_features(run: Run, cpu: str, sets: list[str]) -> None:
    assert run(SETS, cpu=cpu) == sets


@pytest.mark.parametrize("kind", ["float32", "int8", "int4"])
def test_sets_give_the_same_bits(answers: Any, kind: str) -> None:
    for isa, answer in answers[kind].items():
        assert answer == answers[kind]["scalar"], isa


def test_products_of_bfloat16_are_close(answers: Any) -> None:
    found = answers["bfloat16"]
    for isa in ("neon", "neon_dot", "neon_i8mm"):
        assert found[isa] == found["scalar"], isa
    (tokens, scores), (paired_tokens, paired_scores) = found["scalar"], found["neon_bf16"]
    assert paired_tokens == tokens
    assert scores != paired_scores == pytest.approx(scores, abs=0.01)


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_tokens_are_those_of_this_machine(answers: Any, kind: str) -> None:
    here: dict[str, Any] = {}
    exec(ANSWER, here)
    tokens, scores = here["answer"](**KINDS[kind])
    assert answers[kind]["neon"][0] == list(tokens)
    assert answers[kind]["neon"][1] == pytest.approx(scores, abs=1e-4)
