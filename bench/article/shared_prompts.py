"""500 prompts behind a few system prompts: without reuse, with whole blocks as hashes find them, and to the token."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

from bench.article.study import ENGINES, GUIDE, Claim, Result, Setting, Study, seconds
from quire.llm import LLM
from quire.sched.prefix import Node, PrefixMatch

SYSTEMS, SYSTEM = 10, 203  # system prompts, and their tokens: no multiple of a block
QUESTION, ANSWER = 24, 8  # tokens
BLOCK = 16


def measure(setting: Setting) -> Result:
    count = setting.count(500, 20)
    figures = {
        name: setting.once(name, partial(_run, setting, name, count))
        for name in ("no reuse", f"whole blocks of {BLOCK}, by hashes", "to the token, by a radix tree")
    }
    none = next(iter(figures.values()))[0]
    rows: list[tuple[str | float, ...]] = [
        (name, taken, count / taken, f"{none / taken:.2f} x", f"{reused:.1%}")
        for name, (taken, reused) in figures.items()
    ]
    _, blocks, tree = figures.values()
    return Result(
        ("reuse", "seconds", "prompts/s", "beside none", "prompt tokens reused"),
        rows,
        f"{count} prompts take {none:.1f} s without reuse, {blocks[0]:.1f} s with whole blocks and {tree[0]:.1f} s "
        f"with the radix tree, which is {blocks[0] / tree[0]:.2f} times as fast as blocks here.",
        f"{SYSTEMS} system prompts of {SYSTEM} tokens, questions of {QUESTION}, answers of {ANSWER}. Hashes of blocks "
        "find what the tree finds, cut to whole blocks; all else is the same engine.",
    )


def _run(setting: Setting, name: str, count: int) -> list[float]:
    """Measure seconds and the share of prompt tokens that were reused."""
    caching = name != "no reuse"
    with setting.llm(cache={"enable_prefix_caching": caching, "block_size": BLOCK}) as llm:
        room = llm.max_model_len - QUESTION - ANSWER
        systems = [setting.prompt(llm, min(SYSTEM, room)) for _ in range(SYSTEMS)]
        questions = [setting.prompt(llm, QUESTION)["prompt_token_ids"] for _ in range(count)]
        prompts = [
            {"prompt_token_ids": systems[i % SYSTEMS]["prompt_token_ids"] + question}
            for i, question in enumerate(questions)
        ]
        if name.startswith("whole"):
            _cut_to_blocks(llm)
        seconds(llm, [setting.prompt(llm, 8)], [2])
        taken = seconds(llm, prompts, [ANSWER] * count)
        stats = llm.stats()
    return [taken, stats.prefix_hits / max(1, stats.prefix_queries)]


def _cut_to_blocks(llm: LLM) -> None:
    """Have the engine's prefix index find whole blocks alone, as an index of their hashes does."""
    core: Any = llm
    prefix = core._core.scheduler._tables.prefix
    match = prefix.match

    def whole(tokens: list[int], namespace: Hashable, limit: int) -> tuple[PrefixMatch, Node]:
        found, cursor = match(tokens, namespace, limit)
        if not found.tail:
            return found, cursor
        cut: tuple[PrefixMatch, Node] = match(tokens, namespace, found.num_tokens // BLOCK * BLOCK)
        return cut

    prefix.match = whole


STUDY = Study(
    "500 prompts with and without reuse",
    (
        Claim("500 prompts take 54.2 s with SGLang and 58.9 s with vLLM", (GUIDE,)),
        Claim("SGLang equals vLLM on most loads and is faster where prefixes are shared", (ENGINES,)),
    ),
    measure,
)
