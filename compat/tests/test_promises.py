"""What the articles draw instead of running: generation step by step."""

from __future__ import annotations

from quire import LLM, SamplingParams


def test_one_token_at_a_time_is_the_whole_run() -> None:
    """Each step appends the token that the last one chose, until the end of the sequence."""
    with LLM() as llm:
        prompt = llm.get_tokenizer().encode("Once upon a time")  # type: ignore[union-attr]
        greedy = SamplingParams(temperature=0, max_tokens=12)
        (whole,) = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
        tokens = list(prompt)
        for _ in range(12):
            (step,) = llm.generate(
                [{"prompt_token_ids": tokens}], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False
            )
            tokens += step.outputs[0].token_ids
    assert tokens[len(prompt) :] == whole.outputs[0].token_ids
