"""The lists of a call are read once for all its prompts, and bounded."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from quire import LLM
from quire.client.adapters import with_adapter
from quire.client.requests import Front
from quire.errors import RequestError
from quire.params import SamplingParams


@pytest.fixture(scope="module")
def front() -> Front:
    return LLM(max_model_len=64, threads=1)._front


def test_prompts_of_a_call_share_what_it_brings(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    whole = front.tokenizer.encode_batch  # type: ignore[union-attr]

    def counted(texts: list[str], *options: bool) -> list[list[int]]:
        encoded.append(len(texts))
        return whole(texts, *options)

    monkeypatch.setattr(front.tokenizer, "encode_batch", counted)
    params = SamplingParams(bad_words=["cat", "dog"], prediction="A dog.")
    made = [front.request(str(i), [i + 1], params) for i in range(50)]
    assert encoded == [4, 1]
    assert all(one.bad_words_token_ids is made[0].bad_words_token_ids for one in made)
    assert all(one.prediction is made[0].prediction for one in made)
    params.bad_words = ("bird",)
    assert front.request("b", [1], params).bad_words_token_ids != made[0].bad_words_token_ids


def test_lists_of_tokens_are_at_most_the_vocabulary(front: Front) -> None:
    params = SamplingParams(allowed_token_ids=[3, 5, 3, 4] * 100_000)
    assert params.allowed_token_ids == (3, 5, 4)
    assert front.request("a", [1], params).list_entries == 3
    with pytest.raises(RequestError, match="allowed_token_ids: token id"):
        front.request("a", [1], SamplingParams(allowed_token_ids=[1, front.info.vocab_size]))
    prediction = front.request("a", [1], SamplingParams(prediction=[7] * 100_000)).prediction
    assert len(prediction) == front.info.max_model_len


def test_only_adapters_have_the_spare_tokens(front: Front) -> None:
    card = replace(front.info, spare_tokens=4)
    own = card.vocab_size - 4
    request = front.request("a", [1, own - 1], SamplingParams())
    program = msgspec.structs.replace(request, tokens=[], gens=(request,))
    assert with_adapter(program, None, card) == program
    for tokens, params in (([1, own, own + 1], {}), ([1], {"allowed_token_ids": [2, own]})):
        with pytest.raises(
            RequestError, match=f"token id {own} is outside the vocabulary .0 to {own - 1}. of"
        ):
            with_adapter(front.request("a", tokens, SamplingParams(**params)), None, card)
