"""Drafters in published layouts: logits, drafts and accepted counts are those that their authors' code computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from quire import LLM, SamplingParams
from quire.devices.sampling import Logits
from quire.errors import ConfigError, ModelError
from quire.spec_decode.draft_pass import Picker
from tests.near import assert_near

FOLDERS = (
    "eagle-llama",
    "eagle3-llama",
    "eagle3-llama-narrow",
    "eagle3-qwen3-speculators",
    "eagle31-llama-speculators",
    "mtp-deepseek-v3",
    "medusa-llama",
    "mlp-llama-untied",
    "mlp-qwen3-tied",
    "dflash-qwen3",
)


class Recorder(Picker):
    """A picker that keeps the logits it is shown."""

    seen: list[np.ndarray]

    def pick(self, logits: Logits, seqs: Any, ahead: Any) -> list[int]:
        values = logits.numpy()
        self.seen += [row.copy() for row in values]
        best = values.argmax(1)
        found: list[int] = (best if self._target_ids is None else self._target_ids[best]).tolist()
        return found

    def needs_largest(self, seqs: Any) -> bool:
        return False  # so that all logits are computed


def drafting(llm: LLM) -> tuple[Any, Recorder]:
    """The proposer of `llm`, which records from now on."""
    proposer = llm._core._executor.parts[-1]._proposer
    proposer._picker.__class__ = Recorder
    proposer._picker.seen = []
    return proposer, proposer._picker


def start(data: Path, folder: str, **options: Any) -> LLM:
    expected = json.loads((data / folder / "expected.json").read_text())
    config = {"num_speculative_tokens": expected["k"], "adaptive": False, "draft_sample_method": "greedy"}
    config |= {"method": "mtp"} if expected["kind"] == "mtp" else {"model": str(data / folder)}
    return LLM(str(data / expected["target"]), dtype="float32", speculative_config=config, **options)


@pytest.mark.parametrize("folder", FOLDERS)
def test_logits_and_drafts(folder: str, data: Path) -> None:
    data = data / "speculators"
    expected = json.loads((data / folder / "expected.json").read_text())
    tensors = load_file(data / folder / "expected.safetensors")
    tokens = expected["prompt"] + expected["continuation"]
    llm = start(data, folder)
    proposer, picker = drafting(llm)
    drafts: list[list[int]] = []
    propose = proposer.propose

    def watched(asks: Any, step: Any) -> Any:
        found = propose(asks, step)
        drafts.append(list(found[0].tokens))
        return found

    proposer.propose = watched
    count = expected["k"]
    for place, p in enumerate(expected["positions"]):
        picker.seen, drafts[:] = [], []
        params = SamplingParams(temperature=0, max_tokens=count + 2, allowed_token_ids=[tokens[p]])
        llm.generate({"prompt_token_ids": tokens[:p]}, params, use_tqdm=False)
        found = np.stack(picker.seen[:count])
        assert_near(found, tensors["logits"][place], err_msg=f"p = {p}")
        assert drafts[0] == expected["draft_tokens"][place]


def counts(llm: LLM) -> tuple[int, int, list[int]]:
    """Drafts, accepted tokens, and those by position, as vLLM's metrics tell them."""
    found = {metric.name.removeprefix("vllm:spec_decode_num_"): metric for metric in llm.get_metrics()}
    by_position: Any = found.get("accepted_tokens_per_pos")
    drafts, accepted = (int(found[name].value) for name in ("drafts", "accepted_tokens"))
    return drafts, accepted, [] if by_position is None else by_position.values


@pytest.mark.parametrize("folder", FOLDERS)
def test_accepted_counts(folder: str, data: Path) -> None:
    """One greedy request from each position of the target's continuation accepts what the table says.

    It stops at the token that follows the first draft.
    """
    data = data / "speculators"
    expected = json.loads((data / folder / "expected.json").read_text())
    tokens, count = expected["prompt"] + expected["continuation"], expected["k"]
    llm = start(data, folder, enable_prefix_caching=False)
    compared = 0
    for p, accepted in zip(expected["positions"], expected["accepted_greedy"], strict=True):
        last = p + 1 + accepted
        if p < len(expected["prompt"]) or last >= len(tokens) or tokens[last] in tokens[p:last]:
            continue  # the target's greedy text does not pass here, or would stop earlier
        drafts, before, by_position = counts(llm)
        params = SamplingParams(temperature=0, max_tokens=count + 3, stop_token_ids=[tokens[last]])
        output = llm.generate({"prompt_token_ids": tokens[:p]}, params, use_tqdm=False)[0].outputs[0]
        assert output.token_ids == tokens[p : last + 1]
        now = counts(llm)
        assert (now[0] - drafts, now[1] - before) == (1, accepted), f"p = {p}"
        grown = [mine - theirs for mine, theirs in zip(now[2], [*by_position, *[0] * count], strict=False)]
        assert grown == [1] * accepted + [0] * (len(grown) - accepted)
        compared += 1
    assert compared >= 2


def outputs(llm: LLM, tokens: list[int]) -> list[Any]:
    """Greedy and sampled text from many places of `tokens`, in one batch."""
    prompts: list[Any] = [{"prompt_token_ids": tokens[start : 6 + 2 * start]} for start in range(8)]
    params = [
        SamplingParams(
            temperature=i % 3 / 2, seed=i, max_tokens=30, logprobs=1, repetition_penalty=1 + i % 2 / 5
        )
        for i in range(8)
    ]
    return [output.outputs for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_outputs_are_those_of_the_target_alone(folder: str, data: Path) -> None:
    """In batches, in chunks, from the prefix cache and after preemption."""
    data = data / "speculators"
    expected = json.loads((data / folder / "expected.json").read_text())
    tokens = expected["prompt"] + expected["continuation"]
    wanted = outputs(LLM(str(data / expected["target"]), dtype="float32"), tokens)
    limits = {"num_gpu_blocks_override": 9, "max_model_len": 128, "max_num_batched_tokens": 16}
    llm = start(data, folder, **limits)
    for _ in range(2):
        assert outputs(llm, tokens) == wanted
    llm._core.scheduler.check()
    stats = llm.stats()
    assert stats.num_preemptions > 0
    assert stats.spec_draft_tokens > 50


def test_a_speculator_alone_finds_its_target(data: Path) -> None:
    folder = data / "speculators" / "eagle3-qwen3-speculators"
    expected = json.loads((folder / "expected.json").read_text())
    llm = LLM(
        str(folder), dtype="float32", speculative_config={"num_speculative_tokens": 2, "adaptive": False}
    )
    prompt: Any = {"prompt_token_ids": expected["prompt"]}
    output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)[0].outputs[0]
    assert output.token_ids == expected["continuation"][:8]
    assert llm.stats().spec_accepted_tokens > 2


@pytest.mark.parametrize(
    ("target", "config", "message"),
    [
        ("target-qwen3", {"model": "mlp-llama-untied", "num_speculative_tokens": 4}, "more than the 3"),
        ("mtp-deepseek-v3", {"model": "eagle-llama"}, "wide"),
        ("mtp-deepseek-v3", {"model": "medusa-llama"}, "needs"),
        ("target-qwen3", {"model": "eagle3-llama-narrow", "method": "medusa"}, "no Medusa heads"),
        ("target-llama", {"model": "medusa-llama", "method": "dflash"}, "num_hidden_layers is missing"),
        ("target-llama", {"method": "mtp"}, "no layer that predicts further tokens"),
        ("mtp-deepseek-v3", {"model": "eagle3-llama"}, "layers|needs"),
        ("mtp-deepseek-v3", {"model": "mlp-qwen3-tied"}, "wide"),
        ("target-llama", {"method": "eagle3"}, "give a model for method eagle3"),
        ("target-llama", {"num_speculative_tokens": 3}, "give a method or a model"),
        ("target-llama", {"method": "ngram", "model": "medusa-llama"}, "uses no model"),
    ],
)
def test_drafters_that_do_not_fit_are_refused(
    target: str, config: dict[str, Any], message: str, data: Path
) -> None:
    data = data / "speculators"
    if "model" in config:
        config = {**config, "model": str(data / config["model"])}
    with pytest.raises((ModelError, ConfigError), match=message):
        LLM(str(data / target), speculative_config=config)


@pytest.mark.parametrize("folder", ["eagle-llama", "eagle3-llama", "mtp-deepseek-v3", "dflash-qwen3"])
def test_drafters_run_beside_ranks(folder: str, data: Path) -> None:
    """The drafter runs on the engine's own rank, which shares the embedding and reads the whole head."""
    data = data / "speculators"
    expected = json.loads((data / folder / "expected.json").read_text())
    tokens = expected["prompt"] + expected["continuation"]
    alone = start(data, folder)
    wanted = outputs(alone, tokens)
    ranks: dict[str, Any] = {"tensor_parallel_size": 2, "exact_across_ranks": True, "threads": 2}
    with start(data, folder, **ranks) as llm:
        assert outputs(llm, tokens) == wanted
        assert llm.stats().spec_accepted_tokens == alone.stats().spec_accepted_tokens
