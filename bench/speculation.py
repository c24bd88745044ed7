"""Figures of speculative decoding, in turns with plain decoding on the same machine.

    python bench/speculation.py simulated MODEL [--rates 0.6 0.7 0.8]   drafts right with a given probability
    python bench/speculation.py overhead MODEL [--sequences 1 4 16 64]  incompressible text: what speculation costs
    python bench/speculation.py pair [MODEL] --draft DRAFTER            one sequence, greedy, with a drafter
    python bench/speculation.py edit MODEL                              predicted outputs on edits of code

`simulated` knows the output beforehand and spoils each drafted token with probability 1 - rate. It prints the speed-up
and what measured step costs predict for it. `overhead` generates at temperature 1 from random tokens.
Accepted lengths: bench/accepted.py.
"""

from __future__ import annotations

import argparse
import difflib
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from accepted import code_edits

from quire import LLM, SamplingParams
from quire.spec_decode.proposer import Draft, SpecSequence, StepView, TokenProposer

SEED = 0


class Oracle(TokenProposer):
    """Drafts the known outputs by prompt; each token is wrong with probability 1 - rate, as are those behind it."""

    def __init__(self, known: dict[tuple[int, ...], list[int]], rate: float, vocab_size: int) -> None:
        self._known, self._rate, self._vocab_size = known, rate, vocab_size
        self._rng = random.Random(SEED)

    def propose(self, asks: Sequence[tuple[SpecSequence, int]], step: StepView) -> list[Draft]:
        drafts = []
        for seq, count in asks:
            output = self._known[tuple(seq.request.tokens)]
            done = len(seq.tokens) - seq.num_prompt
            tokens = output[done : done + count]
            for place in range(len(tokens)):
                if self._rng.random() > self._rate:
                    tokens[place:] = [(token + 1) % self._vocab_size for token in tokens[place:]]
                    break
            drafts.append(Draft(tokens))
        return drafts


def part_of(llm: LLM) -> Any:
    return llm._core._executor.parts[-1]


def seconds(llm: LLM, prompts: list[Any], params: SamplingParams | list[SamplingParams]) -> float:
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def in_turns(runs: dict[str, Callable[[int], float]], turns: int, first: int = 0) -> dict[str, list[float]]:
    """Seconds of each run in each turn; a run gets the turn's number."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(first, first + turns):
        for name, run in runs.items():
            found[name].append(run(turn))
    return found


def random_prompts(llm: LLM, count: int, length: int) -> list[Any]:
    rng = random.Random(SEED)
    return [
        {"prompt_token_ids": [rng.randrange(10, llm.vocab_size) for _ in range(length)]} for _ in range(count)
    ]


def simulated(options: argparse.Namespace) -> None:
    """One sequence; drafts of at most `--tokens`, as many as the controller wants."""
    config = {"method": "ngram", "num_speculative_tokens": options.tokens}
    plain = LLM(options.model, max_model_len=1024)
    fast = LLM(options.model, max_model_len=1024, speculative_config=config)
    prompts = random_prompts(plain, 1, 32)
    params = SamplingParams(temperature=0, max_tokens=options.output, ignore_eos=True)
    output = plain.generate(prompts, params, use_tqdm=False)[0].outputs[0].token_ids
    known = {tuple(prompts[0]["prompt_token_ids"]): list(output)}
    part = part_of(fast)
    for rate in options.rates:
        part._proposer = Oracle(known, rate, plain.vocab_size)
        seconds(fast, prompts, params)  # the controller learns
        before = fast.stats()
        times = in_turns(
            {
                "plain": lambda _: seconds(plain, prompts, params),
                "fast": lambda _: seconds(fast, prompts, params),
            },
            options.turns,
        )
        after = fast.stats()
        steps = after.num_steps - before.num_steps
        costs = part.controller.steps
        drafted = (after.spec_draft_tokens - before.spec_draft_tokens) / steps
        per_step = options.turns * options.output / steps
        speed = statistics.median(times["plain"]) / statistics.median(times["fast"])
        predicted = per_step * costs.seconds(1) / costs.seconds(1 + round(drafted))
        print(json.dumps({
            "rate": rate, "tokens_per_step": round(per_step, 2), "drafted_per_step": round(drafted, 2),
            "speedup": round(speed, 3), "predicted": round(predicted, 3),
            "plain_tokens_per_s": round(options.output / statistics.median(times["plain"]), 1),
            "step_ms": {rows: round(costs.seconds(rows) * 1e3, 2) for rows in (1, 2, 3, 4, 6, 8)},
        }))  # fmt: skip


def overhead(options: argparse.Namespace) -> None:
    configs: dict[str, Any] = {
        "plain": None,
        "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 5},
        "suffix": {"method": "suffix"},
    }
    if options.draft:
        configs["draft model"] = {"model": options.draft}
    llms = {name: LLM(options.model, max_model_len=1024, speculative_config=c) for name, c in configs.items()}
    for count in options.sequences:
        prompts = random_prompts(llms["plain"], count, 16)
        runs = {name: partial(sampled, llm, prompts, options.output) for name, llm in llms.items()}
        in_turns(runs, 1)
        found = in_turns(runs, options.turns, first=1)
        ratios = {
            name: statistics.median(mine / plain for mine, plain in zip(times, found["plain"], strict=True))
            for name, times in found.items()
        }
        plain = statistics.median(found.pop("plain"))
        by_plain = {name: round(ratios[name], 4) for name in found}
        print(json.dumps({"sequences": count, "plain_s": round(plain, 4), "by_plain": by_plain}), flush=True)


def sampled(llm: LLM, prompts: list[Any], output: int, turn: int) -> float:
    """Seconds for text at temperature 1, another one in each turn."""
    params = SamplingParams(temperature=1, seed=1000 * turn, max_tokens=output, ignore_eos=True)
    return seconds(llm, prompts, params)


def edit(options: argparse.Namespace) -> None:
    """Predicted outputs that differ from the output as a file of this repository does from its next version.

    The model's own greedy text stands for the new file. The prediction has it where an edit left the old file, and
    random tokens where the old file had others.
    """
    llm, rng = LLM(options.model, max_model_len=2048), random.Random(SEED)
    tokenizer, ratios = llm.get_tokenizer(), []
    for before, after in code_edits(options.turns):
        old, new = (tokenizer.encode(text)[: options.output] for text in (before, after))
        prompts = random_prompts(llm, 1, 64)
        params = SamplingParams(temperature=0, max_tokens=len(new), ignore_eos=True)
        began = time.perf_counter()
        output = list(llm.generate(prompts, params, use_tqdm=False)[0].outputs[0].token_ids)
        plain, prediction = time.perf_counter() - began, []
        for kind, i, j, first, last in difflib.SequenceMatcher(None, old, new, False).get_opcodes():
            other = [rng.randrange(10, llm.vocab_size) for _ in range(j - i)]
            prediction += output[first:last] if kind == "equal" else other
        steps = llm.stats().num_steps
        fast = seconds(llm, prompts, msgspec.structs.replace(params, prediction=prediction))
        steps = llm.stats().num_steps - steps
        ratios.append(plain / fast)
        print(json.dumps({
            "tokens": len(new), "steps": steps, "plain_s": round(plain, 2), "predicted_s": round(fast, 2),
            "speedup": round(plain / fast, 2),
        }), flush=True)  # fmt: skip
    print(json.dumps({"median_speedup": round(statistics.median(ratios), 2)}))


def pair(options: argparse.Namespace) -> None:
    """One sequence, plain and with a drafter, greedy: seconds per 100 tokens in turns."""
    plain = LLM(options.model)
    fast = LLM(options.model, speculative_config={"model": options.draft})
    prompts = ["Once upon a time, there was a little"] * 1
    params = SamplingParams(temperature=0, max_tokens=options.output, ignore_eos=True)
    runs = {name: partial(_once, llm, prompts, params) for name, llm in (("plain", plain), ("drafter", fast))}
    in_turns(runs, 5)
    found = in_turns(runs, options.turns)
    before = fast.stats()
    _once(fast, prompts, params, 0)
    after = fast.stats()
    print(json.dumps({
        "plain_tokens_per_s": round(options.output / statistics.median(found["plain"])),
        "with_drafter": round(options.output / statistics.median(found["drafter"])),
        "tokens_per_step": round(options.output / (after.num_steps - before.num_steps), 2),
        "step_ms": {rows: round(part_of(fast).controller.steps.seconds(rows) * 1e3, 4) for rows in (1, 2, 3, 4, 5)},
        "draft_ms": round(part_of(fast).controller.drafting.seconds(1) * 1e3, 4),
    }))  # fmt: skip


def _once(llm: LLM, prompts: list[Any], params: SamplingParams, turn: int) -> float:
    return seconds(llm, prompts, params)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("simulated", "overhead", "pair", "edit"))
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--draft", help="a draft model or head")
    parser.add_argument("--rates", type=float, nargs="*", default=[0.6, 0.7, 0.8])
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    {"simulated": simulated, "overhead": overhead, "pair": pair, "edit": edit}[options.what](options)


if __name__ == "__main__":
    main()
