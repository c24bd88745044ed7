"""lm-evaluation-harness over vLLM's names and over the server: transformers' log-likelihoods.

Needs lm_eval (`pip install lm_eval`), which the tests' environment does not bring.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from zoo import draft

from tests.serve.running import start

lm_eval = pytest.importorskip("lm_eval.evaluator", reason="lm_eval is not installed", exc_type=ImportError)
TaskManager = pytest.importorskip("lm_eval.tasks", exc_type=ImportError).TaskManager

pytestmark = pytest.mark.slow

TASK = """
task: made_up
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
"""
ROWS = [
    {
        "question": f"The number {i} is",
        "choices": [" odd", " even", " a very large one", "!"],
        "answer": i % 2,
    }
    for i in range(8)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(draft(tmp_path_factory.mktemp("models") / "draft"))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "rows.json"
    data.write_text("\n".join(map(json.dumps, ROWS)))
    (folder / "made_up.yaml").write_text(TASK.format(data=data))
    return folder


def likelihoods(kind: str, tasks: Path, **arguments: Any) -> np.ndarray:
    """The log-likelihood of each choice of each row."""
    found = lm_eval.simple_evaluate(
        model=kind,
        model_args=arguments,
        tasks=["made_up"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )
    samples = sorted(found["samples"]["made_up"], key=lambda sample: sample["doc_id"])
    return np.array([[float(resp[0][0]) for resp in sample["resps"]] for sample in samples])


def computed(model: str, with_bos: bool) -> np.ndarray:
    """What transformers computes: each choice after its question."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def likelihood(question: str, choice: str) -> float:
        context, whole = (
            tokenizer(text, add_special_tokens=with_bos).input_ids for text in (question, question + choice)
        )
        with torch.inference_mode():
            logprobs = network(torch.tensor([whole])).logits[0].log_softmax(-1)
        return sum(float(logprobs[i - 1, whole[i]]) for i in range(len(context), len(whole)))

    return np.array([[likelihood(row["question"], choice) for choice in row["choices"]] for row in ROWS])


@pytest.mark.parametrize("with_bos", [True, False])
def test_model_vllm_gives_the_figures_of_transformers(model: str, tasks: Path, with_bos: bool) -> None:
    options = {"dtype": "float32", "max_model_len": 256, "add_bos_token": with_bos}
    found = likelihoods("vllm", tasks, pretrained=model, **options)
    np.testing.assert_allclose(found, computed(model, with_bos), atol=1e-3)


@pytest.mark.parametrize("as_ids", [True, False])
def test_local_completions_give_the_figures_of_transformers(
    model: str, tasks: Path, served: str, as_ids: bool
) -> None:
    """The harness sends token ids without a begin token; before a text the server puts it."""
    options = {"tokenizer": model, "base_url": f"{served}/v1/completions", "tokenized_requests": as_ids}
    found = likelihoods("local-completions", tasks, model=model, **options)
    np.testing.assert_allclose(found, computed(model, with_bos=not as_ids), atol=1e-3)


@pytest.fixture(scope="module")
def served(model: str) -> Iterator[str]:
    """The URL of a server."""
    server = start(maker="quire.client.start", model=model, dtype="float32", max_model_len=256)
    yield server.url
    assert server.stop() == 0
