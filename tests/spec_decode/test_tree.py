"""Trees of drafts: how they are grown, cut and laid out, and those that EAGLE's own code draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.spec_decode.proposer import Draft
from quire.spec_decode.tree import TreeBuilder, as_draft
from tests.spec_decode.test_published import FOLDERS, outputs, start


def paths(draft: Draft) -> set[tuple[int, ...]]:
    """The tokens on the way to each node of a tree."""
    ends = [draft.tokens]
    found = {tuple(draft.tokens[: i + 1]) for i in range(len(draft.tokens))}
    for branch in draft.branches:
        before = ends[branch.parent][: branch.fork]
        assert len(before) == branch.fork
        ends.append(before + branch.tokens)
        found |= {tuple(ends[-1][: i + 1]) for i in range(branch.fork, len(ends[-1]))}
    return found


@given(st.lists(st.integers(-1, 20), min_size=1, max_size=21))
def test_any_tree_is_a_chain_and_branches(wishes: list[int]) -> None:
    """Each node's token is its number, so no two siblings are alike."""
    parents = [min(wish, node - 1) for node, wish in enumerate(wishes)]
    ways: list[tuple[int, ...]] = []
    for node, parent in enumerate(parents):
        ways.append((*(ways[parent] if parent >= 0 else ()), node))
    draft = as_draft(range(len(parents)), parents)
    assert paths(draft) == set(ways)
    assert len(draft.tokens) == max(map(len, ways))
    assert len(draft.tokens) + sum(len(b.tokens) for b in draft.branches) == len(parents)


def test_a_builder_keeps_the_likeliest_paths() -> None:
    """Against all paths of a small vocabulary: they are kept by the product of their probabilities."""
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(3, 6)).astype(np.float32)  # of each level, after any node
    builder = TreeBuilder(6, 6)
    for level in range(3):
        builder.grow(np.repeat(scores[level : level + 1], len(builder.frontier) or 1, 0))
    logs = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    every = {(a,): logs[0, a] for a in range(6)}
    every |= {(a, b): logs[0, a] + logs[1, b] for a in range(6) for b in range(6)}
    best = sorted(every, key=lambda path: -every[path])[:9]
    shallow = {path for path in paths(builder.draft(9)) if len(path) < 3}
    assert shallow <= set(best)
    assert [builder.scores[i] for i in builder.best(4)] == pytest.approx(
        sorted([builder.scores[i] for i in builder.best(4)], key=builder.scores.index)
    )


@pytest.mark.parametrize("folder", ["eagle-llama", "eagle3-llama", "eagle3-llama-narrow"])
def test_trees_are_those_of_eagle(folder: str, data: Path) -> None:
    folder_path = data / "speculators" / folder
    expected = json.loads((folder_path / "expected.json").read_text())
    tensors = load_file(folder_path / "expected.safetensors")
    nodes = tensors["tree_tokens"].tolist()
    wanted = {
        tuple(nodes[node] for node in row[1:].tolist() if node >= 0)[: depth + 1]
        for row in tensors["tree_paths"]
        for depth in range((row[1:] >= 0).sum())
    }
    llm = start(data / "speculators", folder, tree_top_k=4, tree_tokens=10)
    proposer = llm._core._executor.parts[-1]._proposer
    drafts: list[Draft] = []
    propose = proposer.propose

    def watched(asks: Any, step: Any) -> Any:
        drafts.extend(propose(asks, step))
        return drafts[-len(asks) :]

    proposer.propose = watched
    tokens, p = expected["prompt"] + expected["continuation"], int(tensors["tree_p"])
    params = SamplingParams(temperature=0, max_tokens=6, allowed_token_ids=[tokens[p]])
    llm.generate({"prompt_token_ids": tokens[:p]}, params, use_tqdm=False)
    assert paths(drafts[0]) == wanted


@pytest.mark.parametrize(
    "folder", ["eagle-llama", "eagle3-qwen3-speculators", "mtp-deepseek-v3", "mlp-qwen3-tied"]
)
def test_drafts_after_an_accepted_branch_are_those_of_a_fresh_request(folder: str, data: Path) -> None:
    """The drafter has read the hidden states of the accepted path, and keeps nothing of other branches."""
    expected = json.loads((data / "speculators" / folder / "expected.json").read_text())
    llm = start(data / "speculators", folder, tree_top_k=4, tree_tokens=12, enable_prefix_caching=False)
    proposer = llm._core._executor.parts[-1]._proposer
    drafts: dict[int, set[tuple[int, ...]]] = {}
    propose = proposer.propose

    def watched(asks: Any, step: Any) -> Any:
        found = propose(asks, step)
        drafts[len(asks[0][0].tokens)] = paths(found[0])
        return found

    proposer.propose = watched
    prompt = expected["prompt"]
    params = SamplingParams(temperature=0, max_tokens=24)
    request: Any = {"prompt_token_ids": prompt}
    tokens = prompt + list(llm.generate(request, params, use_tqdm=False)[0].outputs[0].token_ids)
    together, compared = dict(drafts), 0
    assert llm.stats().spec_accepted_tokens > 5
    for length, draft in together.items():
        if len(tokens) - length < 8:
            continue  # near the end drafts are shorter
        drafts.clear()
        params = SamplingParams(temperature=0, max_tokens=9)
        llm.generate({"prompt_token_ids": tokens[: length - 1]}, params, use_tqdm=False)
        assert drafts[length] == draft, f"after {length} tokens"
        compared += 1
    assert compared >= 3


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder != "dflash-qwen3"])
def test_trees_change_no_output(folder: str, data: Path) -> None:
    """In batches, in chunks, from the prefix cache and after preemption; with them fewer steps are needed."""
    data = data / "speculators"
    expected = json.loads((data / folder / "expected.json").read_text())
    tokens = expected["prompt"] + expected["continuation"]
    wanted = outputs(LLM(str(data / expected["target"]), dtype="float32"), tokens)
    limits = {"num_gpu_blocks_override": 9, "max_model_len": 128, "max_num_batched_tokens": 16}
    llm = start(data, folder, tree_top_k=3, tree_tokens=8, **limits)
    for _ in range(2):
        assert outputs(llm, tokens) == wanted
    llm._core.scheduler.check()
    stats = llm.stats()
    assert stats.num_preemptions > 0
    assert stats.spec_draft_tokens > 2 * stats.spec_drafts


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model": "dflash-qwen3", "tree_top_k": 2}, "drafts no trees"),
        ({"method": "ngram", "tree_top_k": 2}, "drafts no trees"),
        ({"method": "suffix", "tree_tokens": 9}, "without tree_top_k"),
        (
            {
                "model": "eagle3-qwen3-speculators",
                "num_speculative_tokens": 4,
                "tree_top_k": 2,
                "tree_tokens": 3,
            },
            "less than",
        ),
        ({"model": "eagle3-qwen3-speculators", "tree_top_k": 99}, "<= 32"),
    ],
)
def test_wrong_trees_are_refused(config: dict[str, Any], message: str, data: Path) -> None:
    data = data / "speculators"
    if "model" in config:
        config = {**config, "model": str(data / config["model"])}
    with pytest.raises(ConfigError, match=message):
        LLM(str(data / "target-qwen3"), speculative_config=config)
