"""The first request for a feature: what it imports does not hold up the steps of others."""

from __future__ import annotations

import subprocess
import sys

import pytest

WATCHED = """
import sys
import threading
from importlib.machinery import PathFinder

class Watch:
    found = []

    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None:
            Watch.found.append((name, threading.current_thread().name))
        return spec

from quire import LLM, BeamSearchParams, SamplingParams
from quire.params import StructuredOutputsParams
llm = LLM(max_model_len=128, threads=1)
llm.generate("Once", SamplingParams(max_tokens=2), use_tqdm=False)
sys.meta_path.insert(0, Watch)
{request}
print(*{{name for name, _ in Watch.found}})
print(*(name for name, thread in Watch.found if thread == "quire-engine"))
"""


@pytest.mark.parametrize(
    ("request_", "feature"),
    [
        (
            "llm.generate('A', SamplingParams(structured_outputs=StructuredOutputsParams(regex='[ab]+')))",
            "grammar",
        ),
        ("llm.generate('A', SamplingParams(max_tokens=4, prediction=' dog was'))", "spec_decode"),
        ("llm.generate('A', SamplingParams(logprob_token_ids=[5]))", "processors"),
        ("llm.generate('A', SamplingParams(logits_processors=[lambda past, row: row]))", "processors"),
        ("llm.embed('A dog')", "pooling"),
        ("llm.beam_search('A', BeamSearchParams(beam_width=2, max_tokens=4))", "program"),
        (
            "params = StructuredOutputsParams(choice=['a', 'b'], select=True)\n"
            "llm.generate('A', SamplingParams(structured_outputs=params))",
            "program",
        ),
        (
            "steps = [{'type': 'text', 'text': 'A'}, {'type': 'gen', 'regex': '[ab]+', 'max_tokens': 3}]\n"
            "list(llm.run_program({'steps': steps}))",
            "program",
        ),
    ],
    ids=[
        "regex", "prediction", "scores", "function", "vector", "beams", "choices", "program"
    ],
)  # fmt: skip
def test_a_first_request_imports_nothing_on_the_engines_thread(request_: str, feature: str) -> None:
    code = WATCHED.format(request=request_)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    imported, by_engine = result.stdout.split("\n")[-3:-1]
    assert f"quire.{feature}.feature" in imported.split()
    assert by_engine == ""
