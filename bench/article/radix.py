"""Chats of many turns: reuse to the token beside reuse of whole blocks."""

from __future__ import annotations

from bench.article.study import GUIDE, Claim, Result, Setting, Study, exactly

TURNS = 6
QUESTION, ANSWER = 24, 40  # tokens
BLOCKS = (16, 64, 256)


def measure(setting: Setting) -> Result:
    chats = setting.count(32, 2)
    found = dict.fromkeys(BLOCKS, 0)
    prompts = cached = 0
    with setting.llm() as llm:
        turns = min(TURNS, llm.max_model_len // (QUESTION + ANSWER))
        histories: list[list[int]] = [[] for _ in range(chats)]
        for _ in range(turns):
            for history in histories:
                history += setting.prompt(llm, QUESTION)["prompt_token_ids"]
            outputs = llm.generate(
                [{"prompt_token_ids": history} for history in histories], exactly(ANSWER), use_tqdm=False
            )
            for history, output in zip(histories, outputs, strict=True):
                reused = output.num_cached_tokens or 0
                prompts, cached = prompts + len(history), cached + reused
                for size in BLOCKS:
                    found[size] += reused // size * size
                history += output.outputs[0].token_ids
    rows: list[tuple[str | float, ...]] = [("to the token", f"{cached / prompts:.1%}", prompts - cached, "")]
    rows += [
        (
            f"whole blocks of {size}",
            f"{count / prompts:.1%}",
            prompts - count,
            f"{(prompts - count) / (prompts - cached) - 1:.0%} more",
        )
        for size, count in found.items()
    ]
    return Result(
        ("reuse", "prompt tokens reused", "computed", ""),
        rows,
        f"Reuse to the token serves {rows[0][1]} of the prompt tokens, whole blocks of 16 serve {rows[1][1]}: a "
        "turn loses up to 15 tokens. The shorter the turns, the more that counts.",
        f"{chats} chats of {turns} turns, questions of {QUESTION} tokens, answers of {ANSWER}. Reuse by block is "
        "counted from the same run: hits cut to whole blocks.",
    )


STUDY = Study(
    "A radix tree beside block hashes",
    (Claim("RadixAttention is about 10% better in large chats of many turns", (GUIDE,)),),
    measure,
)
