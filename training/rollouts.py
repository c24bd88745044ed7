"""Write text that a model generates itself, for drafters to learn from: stories and chats, sampled and greedy.

    python training/rollouts.py --data ../shared/data --model src/quire/assets/quire-stories --out RUN/rollouts.npy

Prompts are beginnings of training stories and requests in the chat format. A drafter guesses what its target says, so
its own text teaches more than the text that the target learned from.
"""

import argparse
import random
from pathlib import Path
from typing import Any

import numpy as np
from chat import ABOUT_ME, ASK_ANY, ASK_ONE, ASK_TWO, ASSISTANT, END, USER
from sources import tiny_stories

from quire import LLM, SamplingParams

THINGS = (
    "a dog", "a cat", "a red ball", "a big tree", "a princess", "a bird", "a brave boy", "the sea", "a cake",
    "a kind bear", "a little fish", "a lost toy", "a garden", "the moon", "two friends", "a rainy day",
)  # fmt: skip
TEMPERATURES = (1.0, 1.0, 0.7, 0.0)
CHAT_SHARE = 0.25


def prompt_text(stories: list[str], rng: random.Random) -> str:
    """The beginning of a story, or a request in the chat format."""
    if rng.random() < CHAT_SHARE:
        first, second = rng.sample(THINGS, 2)
        asks = [rng.choice(ASK_ONE).format(a=first), rng.choice(ASK_TWO).format(a=first, b=second)]
        asks += [rng.choice(ASK_ANY), rng.choice(ABOUT_ME)[0]]
        return f"{USER}{rng.choice(asks)}{END}{ASSISTANT}"
    words = rng.choice(stories).split(" ")
    return " ".join(words[: rng.randrange(3, 40)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=3_000_000)
    parser.add_argument("--length", type=int, default=192, help="tokens of a row")
    args = parser.parse_args()
    rng = random.Random(0)
    stories = tiny_stories(args.data).train
    llm = LLM(args.model, max_num_seqs=128)
    tokenizer = llm.get_tokenizer()
    rows: list[list[int]] = []
    while len(rows) * args.length < args.tokens:
        prompts: list[Any] = []
        params = []
        for _ in range(512):
            prompts.append({"prompt_token_ids": list(tokenizer.encode(prompt_text(stories, rng)))})
            params.append(
                SamplingParams(
                    temperature=rng.choice(TEMPERATURES), seed=rng.randrange(1 << 30), max_tokens=400
                )
            )
        for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
            tokens = prompt["prompt_token_ids"] + list(output.outputs[0].token_ids)
            rows += [
                tokens[i : i + args.length] for i in range(0, len(tokens) - args.length + 1, args.length)
            ]
        print(f"{len(rows) * args.length:,} tokens", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    np.save(args.out, np.array(rows, np.uint16))


if __name__ == "__main__":
    main()
