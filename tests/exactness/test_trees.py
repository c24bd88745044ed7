"""Trees of drafts never change a result, whatever they hold; branches are accepted where they are right."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from quire import LLM
from quire.spec_decode.proposer import Computed, Draft, SpecSequence, StepView
from quire.spec_decode.tree import as_draft
from tests.exactness.requests import PARAMS, make_prompts
from tests.exactness.test_schedule import load, remembered, results
from tests.tiny import EOS, VOCAB_SIZE

SCHEDULES: dict[str, dict[str, Any]] = {
    "batched": {},
    "one at a time": {"max_num_seqs": 1},
    "small blocks": {"max_num_batched_tokens": 19, "block_size": 4},
    "preempted": {"num_gpu_blocks_override": 14, "max_model_len": 160},
    "overlapped": {"async_scheduling": True},
}
MODELS = ("llama-f32", "mistral-f32-window", "llama-int8-kv-int8")
DEPTH = 5


class RandomTrees:
    """Draws trees of right tokens, rubbish and ends; the right path runs through branches at random.

    `known` has the output of each seed. `through_branches` counts right tokens that only a branch holds.
    """

    drafts_freely = False
    may_sleep = True

    def __init__(self, known: dict[int, list[int]], seed: int) -> None:
        self._known, self._rng = known, random.Random(seed)
        self.through_branches = 0

    def start(self, seq: SpecSequence) -> None: ...

    def stop(self, seq: SpecSequence) -> None: ...

    def observe(self, computed: Sequence[Computed], step: StepView) -> None: ...

    def propose(self, asks: Sequence[tuple[SpecSequence, int]], step: StepView) -> list[Draft]:
        return [self._tree(seq) if not seq.request.constrained else Draft() for seq, _ in asks]

    def _tree(self, seq: SpecSequence) -> Draft:
        rng = self._rng
        output = self._known.get(seq.request.seed, [])
        right = output[len(seq.tokens) - seq.num_prompt :][: rng.randrange(DEPTH + 1)]
        tokens, parents, depths, last = [], [], [], -1
        for depth in range(1, DEPTH + 1):
            level = [i for i in range(len(tokens)) if depths[i] == depth - 1] if depth > 1 else [-1]
            if not level:
                break
            for parent in rng.sample(level, min(len(level), 2)):
                own = [right[depth - 1]] if parent == last and depth <= len(right) else []
                others = [token for token in (EOS, *range(VOCAB_SIZE)) if token not in own]
                children = own + rng.sample(others, rng.randrange(3))
                rng.shuffle(children)
                for token in children:
                    tokens.append(token)
                    parents.append(parent)
                    depths.append(depth)
            following = [i for i, d in enumerate(depths) if d == depth and parents[i] == last]
            hits = [i for i in following if depth <= len(right) and tokens[i] == right[depth - 1]]
            last = hits[0] if hits else -2
        draft = as_draft(tokens, parents)
        if right and draft.tokens[:1] != right[:1] and any(b.tokens[0] == right[0] for b in draft.branches):
            self.through_branches += 1
        return draft


@pytest.fixture(scope="module")
def plain(tiny_model: Callable[..., str]) -> Callable[[str], list[Any]]:
    return remembered(tiny_model, make_prompts(), PARAMS)


def with_trees(
    tiny_model: Callable[..., str], model: str, known: dict[int, list[int]], **options: Any
) -> LLM:
    """An engine that verifies trees, with random ones in place of its own."""
    config = {
        "model": tiny_model("qwen2"),
        "num_speculative_tokens": DEPTH,
        "tree_top_k": 4,
        "tree_tokens": 24,
    }
    llm = load(tiny_model, model, speculative_config={**config, "adaptive": False}, **options)
    llm._core._executor.parts[-1]._proposer = RandomTrees(known, len(options))
    return llm


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_trees_change_nothing(
    model: str, schedule: str, tiny_model: Callable[..., str], plain: Callable[[str], list[Any]]
) -> None:
    wanted = plain(model)
    known = {
        params.seed: list(outputs[0].token_ids)
        for params, (_, outputs) in zip(PARAMS, wanted, strict=True)
        if params.seed is not None
    }
    llm = with_trees(tiny_model, model, known, **SCHEDULES[schedule])
    for _ in range(2):  # the second time from the prefix cache, which accepted branches have filled
        assert results(llm, make_prompts(), PARAMS) == wanted
    proposer = llm._core._executor.parts[-1]._proposer
    stats = llm.stats()
    assert proposer.through_branches > 20
    assert stats.spec_accepted_tokens > 100
    assert stats.spec_draft_tokens - stats.spec_accepted_tokens > 100
    llm._core.scheduler.check()
