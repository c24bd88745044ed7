"""Train the tokenizer and turn every source into token files.

    python prepare.py --data ../shared/data --run RUN

Writes RUN/tokenizer.json and, for each source, RUN/tokens/NAME.npz with `tokens` (uint16, documents one
after the other, each between BOS and EOS) and `starts` (where each document begins).
"""

import argparse
import random
import re
from pathlib import Path

import numpy as np
import sources
from chat import (
    BOS,
    EOS,
    SPECIAL_TOKENS,
    SubjectFinder,
    about_me_chats,
    dialogue_chat,
    story_chat,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 4096


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    # Digits stand alone: a small vocabulary has no room for numbers.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(
            single=f"{BOS} $A",
            pair=f"{BOS} $A {BOS} $B",
            special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
        ),
    ])  # fmt: skip
    return tokenizer


def save_tokens(path: Path, tokenizer: Tokenizer, documents: list[str]) -> None:
    encoded = tokenizer.encode_batch([BOS + d + EOS for d in documents], add_special_tokens=False)
    lengths = [len(e.ids) for e in encoded]
    starts = np.cumsum([0, *lengths[:-1]]) if lengths else np.zeros(0, dtype=np.int64)
    tokens = np.concatenate([np.array(e.ids, dtype=np.uint16) for e in encoded])
    np.savez(path, tokens=tokens, starts=starts)
    size = sum(len(d.encode()) for d in documents)
    megabytes, millions = size / 1e6, len(tokens) / 1e6
    print(f"{path.stem:20} {len(documents):6} documents {megabytes:7.2f} MB {millions:6.2f} M tokens")


def chat_documents(data: Path, stories: sources.Split, rng: random.Random) -> dict[str, list[str]]:
    finder = SubjectFinder(stories.train)
    talks = list(sources.dialogues(data))
    held_out = [d for d in talks if sources.bucket("".join(d.turns)) < 3]
    spoken = [d for d in talks if sources.bucket("".join(d.turns)) >= 3]
    personas = [d for d in spoken if d.persona]
    orders = [d for d in spoken if not d.persona]
    talk = [dialogue_chat(d, rng) for d in personas * 2 + rng.sample(orders, 1500)]
    return {
        # Twice over, because each copy draws another request for the same story.
        "story-chat": [story_chat(story, finder, rng) for story in stories.train * 2],
        "talk": talk + about_me_chats(rng, copies=12),
        "story-chat-val": [story_chat(story, finder, rng) for story in stories.val],
        "talk-val": [dialogue_chat(d, rng) for d in held_out],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    args = parser.parse_args()
    (args.run / "tokens").mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    stories = sources.tiny_stories(args.data)
    open_stories = sources.open_stories(args.data)
    fairy_tales = sources.fairy_tales(args.data)
    chats = chat_documents(args.data, stories, rng)
    documents = {
        "stories": stories.train,
        "stories-val": stories.val,
        "open-stories": open_stories.train,
        "fairy-tales": [p for tale in fairy_tales.train for p in sources.pieces(tale, 3000)],
        "books": sources.books(args.data).train,
        "teacher": sources.teacher_stories(args.run).train,
        "shakespeare": sources.shakespeare(args.data).train,
        "old-tales": sources.old_tales(args.data).train,
        **chats,
    }
    path = args.run / "tokenizer.json"
    if path.exists():  # checkpoints depend on it, so it is trained once
        tokenizer = Tokenizer.from_file(str(path))
    else:
        mixed = documents["stories"] * 2 + documents["open-stories"] + documents["talk"]
        mixed += documents["books"][::4]
        tokenizer = train_tokenizer([re.sub(r"<\|\w+\|>", "\n", text) for text in mixed])
        tokenizer.save(str(path))
    credits = "\n".join(sources.attributions(args.data))
    (args.run / "ATTRIBUTION.txt").write_text(credits + "\n", encoding="utf-8")
    for name, texts in documents.items():
        save_tokens(args.run / "tokens" / f"{name}.npz", tokenizer, texts)


if __name__ == "__main__":
    main()
