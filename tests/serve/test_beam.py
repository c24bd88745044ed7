"""Beam search and best_of over HTTP."""

from __future__ import annotations

import openai

from quire import LLM, BeamSearchParams
from tests.serve.running import start

PROMPT = "Once upon a time"


def test_beams_and_the_best_of_many() -> None:
    wanted = LLM().beam_search(PROMPT, BeamSearchParams(beam_width=4, max_tokens=12, num_return_sequences=2))
    server = start(maker="quire.client.start", model="", max_model_len=512, threads=1)
    try:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-")
        beams = client.completions.create(
            model="quire-stories",
            prompt=PROMPT,
            n=2,
            max_tokens=12,
            extra_body={"use_beam_search": True, "beam_width": 4},
        )
        assert [choice.text for choice in beams.choices] == [found.text for found in wanted[0].sequences]
        body = {"model": "quire-stories", "prompt": PROMPT, "max_tokens": 8, "seed": 5, "logprobs": 0}
        many = client.completions.create(n=6, **body)
        best = client.completions.create(n=2, best_of=6, **body)

        def mean(choice: object) -> float:
            scores = choice.logprobs.token_logprobs  # type: ignore[attr-defined]
            return float(sum(scores) / len(scores))

        ranked = sorted(many.choices, key=mean, reverse=True)
        assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]
        assert [choice.index for choice in best.choices] == [0, 1]
    finally:
        server.stop()
