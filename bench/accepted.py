"""Accepted lengths of drafts: tokens per step and sequence, each proposer pinned to its full drafts.

    python bench/accepted.py drawn --data ../shared/data --drafter eagle3=RUN/quire-stories-eagle3 ...
    python bench/accepted.py text --data ../shared/data

`drawn`: a model (the shipped one by default) continues held-out stories and answers chats and Spec-Bench prompts,
greedily and at temperature 1. Beside it stands the length that plain rejection sampling would reach with the same
drafters: from both distributions at each drafted position that was reached, the chance sum(min(p, q)) of a drafted
token, or p(d) if the drafter proposes its likeliest token.

`text`: prompt lookup and suffix decoding over real answers, which stand for the model's own: leads of Wikipedia
articles after their bodies, an assistant's answers, and this repository's files after their earlier versions.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from quire import LLM, SamplingParams
from quire.config import SpeculativeOptions
from quire.spec_decode.acceptance import Odds, Tally
from quire.spec_decode.draft_pass import Picker
from quire.spec_decode.lookup import NgramProposer
from quire.spec_decode.proposer import Proposer, SpecSequence, StepView
from quire.spec_decode.suffix import SuffixProposer
from quire.types import Request
from quire.weights.hub import open_tokenizer

TRAINING = Path(__file__).parent.parent / "training"
CHATS = ("Tell me a story about a dog.", "Hi! How are you?", "What do you like to do for fun?", "Who are you?",
         "Tell me a story about the sea and a bird.", "Can you tell me a bedtime story?")  # fmt: skip
LOOKUP = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5, "num_speculative_tokens": 4}


def prompts_of(llm: LLM, data: Path) -> dict[str, list[list[int]]]:
    """Token ids by kind of text; Spec-Bench prompts are cut to 300 tokens."""
    sys.path.insert(0, str(TRAINING))
    import sources  # noqa: PLC0415 - the split of the training, which may be run from anywhere

    tokenizer, rng = llm.get_tokenizer(), random.Random(0)
    stories = rng.sample(sources.tiny_stories(data).test, 24)
    lines = (data / "prompts-specbench/question.jsonl").read_text().splitlines()
    bench = [json.loads(line)["turns"][0] for line in lines[::20]]
    return {
        "stories": [tokenizer.encode(" ".join(story.split(" ")[:12])) for story in stories],
        "chat": [tokenizer.encode(f"<|user|>{text}<|end|><|assistant|>") for text in CHATS],
        "spec-bench": [tokenizer.encode(f"<|user|>{text}<|end|><|assistant|>")[-300:] for text in bench],
    }


class Rejection:
    """Watches a drafter and its target: the chance that rejection sampling accepts at each position of a draft."""

    def __init__(self, llm: LLM) -> None:
        self.sums: dict[int, list[float]] = {}  # by position: number, sum of chances
        self._drafted: dict[
            tuple[int, int], np.ndarray
        ] = {}  # by slot and position: the drafter's distribution
        self._llm, parts = llm, llm._core._executor.parts
        self._sampler, self._part = parts[0].sampler, parts[-1]
        picker: Picker | None = getattr(self._part._proposer, "_picker", None)
        if picker is not None:
            self._watch(picker)
        parts[0].sampler = self  # the target's rows pass here

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def _watch(self, picker: Picker) -> None:
        pick = picker.pick

        def watched(logits: Any, seqs: Any, ahead: Any) -> list[int]:
            values = picker._widened(logits).numpy()
            for row, seq, depth in zip(values, seqs, ahead, strict=True):
                self._drafted[seq.slot, len(seq.tokens) + depth] = softmax(row)
            return pick(logits, seqs, ahead)

        picker.pick = watched  # type: ignore[method-assign]
        picker.needs_largest = lambda seqs: False  # type: ignore[method-assign]

    def sample(self, logits: Any, slots: Any, positions: Any, drafts: Any = None, masks: Any = None) -> Any:
        values = logits.numpy().copy()
        samples = self._sampler.sample(logits, slots, positions, drafts, masks)
        if drafts is not None:
            place = 0
            for row, (slot, position, draft, token) in enumerate(
                zip(slots, positions, drafts, samples.tokens, strict=True)
            ):
                place = place + 1 if row and slots[row - 1] == slot else 0
                if draft < 0 or token < 0:
                    continue
                p, q = softmax(values[row]), self._drafted.get((slot, position))
                chance = float(p[draft]) if q is None else float(np.minimum(p, q[: len(p)]).sum())
                number, total = self.sums.get(place, [0.0, 0.0])
                self.sums[place] = [number + 1, total + chance]
        return samples

    def length(self) -> float:
        """Tokens per step that rejection sampling would reach."""
        found, product = 1.0, 1.0
        for place in sorted(self.sums):
            number, total = self.sums[place]
            product *= total / number
            found += product
        return found


def softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row.astype(np.float64) - row.max())
    return weights / weights.sum()


def drawn(options: argparse.Namespace) -> None:
    configs: dict[str, dict[str, Any]] = {"ngram": LOOKUP, "suffix": {"method": "suffix"}}
    for named in options.drafter:
        name, _, path = named.partition("=")
        configs[name] = {"model": path, "num_speculative_tokens": 3}
    for name, config in configs.items():
        found: dict[str, Any] = {"method": name}
        for temperature in (0.0, 1.0):
            llm = LLM(options.model, max_num_seqs=16, speculative_config={**config, "adaptive": False})
            kinds = prompts_of(llm, options.data)
            watched = Rejection(llm) if temperature else None
            for kind, prompts in kinds.items():
                before = llm.stats()
                if watched:
                    watched.sums.clear()
                params = SamplingParams(temperature=temperature, seed=3, max_tokens=options.output)
                llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
                after = llm.stats()
                drafts = after.spec_drafts - before.spec_drafts
                accepted = after.spec_accepted_tokens - before.spec_accepted_tokens
                found[f"{kind} T={temperature:g}"] = round(1 + accepted / max(1, drafts), 2)
                if watched:
                    found[f"{kind} rejection"] = round(watched.length(), 2)
        print(json.dumps(found), flush=True)


def summaries(data: Path) -> Iterator[tuple[str, str]]:
    """(body, lead) of Wikipedia articles."""
    text = (data / "text-wikitext2/valid.txt").read_text(encoding="utf-8")
    for article in re.split(r"\n = [^=].* = \n", "\n" + text)[1:]:
        lead, *body = article.split("\n = = ")
        if len(body) > 1 and len(lead) > 200:
            yield "\n".join(body)[:12000], lead.strip()


def chats(data: Path, count: int) -> Iterator[tuple[str, str]]:
    """(prompt, answer) of people and an assistant."""
    path = data / "prompts-sharegpt/llmservingsim_sharegpt300_text.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines()[:count]:
        chat = json.loads(line)
        if len(chat["output"]) > 200:
            yield chat["prompt"], chat["output"]


def code_edits(count: int) -> Iterator[tuple[str, str]]:
    """(file before, file after) of small edits in this repository's history."""

    def git(*arguments: str) -> str:
        return subprocess.run(("git", *arguments), capture_output=True, text=True, check=True).stdout

    found = 0
    for line in git("log", "--format=%h", "-400").split():
        for row in git("show", "--numstat", "--format=", line).splitlines():
            added, removed, path = row.split("\t")
            if not path.endswith(".py") or "-" in (added, removed) or not 0 < int(added) + int(removed) < 20:
                continue
            try:
                before, after = git("show", f"{line}~:{path}"), git("show", f"{line}:{path}")
            except subprocess.CalledProcessError:
                continue
            if 2000 < len(after) < 12000:
                yield before, after
                found += 1
            if found == count:
                return


def forced(
    pairs: list[tuple[list[int], list[int]]], make: Callable[[], Proposer], most: int
) -> tuple[float, float]:
    """Tokens per step where the proposer drafts, and over all steps, if each step draws the answer's tokens."""
    proposer, view = make(), StepView(np.zeros((1, 1), np.int32))
    drafts = accepted = steps = tokens = 0
    for prompt, answer in pairs:
        request = Request(id="", tokens=prompt, sampling=SamplingParams(), seed=0, max_tokens=len(answer) + 1)
        seq = SpecSequence(0, request, 0, array("i", prompt), Odds(Tally(0.9)))
        proposer.start(seq)
        done = 1
        seq.tokens.append(answer[0])
        while done < len(answer):
            draft = proposer.propose([(seq, most)], view)[0].tokens
            right = 0
            while right < len(draft) and done + right < len(answer) and draft[right] == answer[done + right]:
                right += 1
            new = answer[done : done + right + 1]
            seq.tokens.extend(new)
            drafts, accepted, steps = drafts + bool(draft), accepted + right, steps + 1
            done, tokens = done + len(new), tokens + len(new)
        proposer.stop(seq)
    return 1 + accepted / max(1, drafts), tokens / steps


def text(options: argparse.Namespace) -> None:
    tokenizer = open_tokenizer(options.data / "tok-qwen2")
    kinds = {
        "summaries": list(summaries(options.data)),
        "chat": list(chats(options.data, 100)),
        "code edits": list(code_edits(40)),
    }
    makers: dict[str, tuple[Callable[[], Proposer], int]] = {
        "ngram": (lambda: NgramProposer(2, 5), 4),
        "suffix": (lambda: SuffixProposer(SpeculativeOptions(method="suffix")), 24),
    }
    for kind, pairs in kinds.items():
        ids = [(tokenizer.encode(a), tokenizer.encode(b)) for a, b in pairs]
        for name, (make, most) in makers.items():
            drafting, every = forced(ids, make, most)
            print(json.dumps({
                "text": kind, "method": name, "answers": len(ids), "tokens": sum(len(b) for _, b in ids),
                "where it drafts": round(drafting, 2), "all steps": round(every, 2),
            }), flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("drawn", "text"))
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--drafter", nargs="*", default=[], help="NAME=PATH of draft models and heads")
    parser.add_argument("--output", type=int, default=150)
    options = parser.parse_args()
    {"drawn": drawn, "text": text}[options.what](options)


if __name__ == "__main__":
    main()
