"""The SamplingParams that a body asks for, over the model's defaults."""

from __future__ import annotations

from typing import Any

from quire.client.front import Front
from quire.params import SamplingParams
from quire.serve.errors import invalid
from quire.serve.openai.protocol import SamplingFields
from quire.serve.openai.structured import constraint_of

# Fields that bodies and SamplingParams share by name, except those whose meaning depends on the endpoint.
_SHARED = set(SamplingParams.__struct_fields__) & set(SamplingFields.__struct_fields__)
_SHARED -= {"max_tokens", "logit_bias", "structured_outputs", "prediction"}

REFUSED = {
    "use_beam_search": "this server samples",
}


def sampling_params(
    front: Front, body: SamplingFields, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Raises RequestError naming the field whose value is not allowed."""
    given: dict[str, Any] = {name: value for name in _SHARED if (value := getattr(body, name)) is not None}
    if body.logit_bias:
        given["logit_bias"] = {_token_id(key): value for key, value in body.logit_bias.items()}
    if body.prediction is not None:
        given["prediction"] = body.prediction.text
    return front.default_params(
        max_tokens=max_tokens, logprobs=logprobs, structured_outputs=constraint_of(body), **given
    )


def _token_id(key: str) -> int:
    if key.isascii() and key.isdecimal() and len(key) < 12:
        return int(key)
    raise invalid(f"logit_bias: {key[:32]!r} is not a token id", "logit_bias", "invalid_value")


def truncated(tokens: list[int], limit: int | None, longest: int) -> list[int]:
    """The last `limit` tokens; -1 keeps as many as leave room for one token of output."""
    if limit is None:
        return tokens
    keep = longest - 1 if limit == -1 else limit
    if keep < 1:
        raise invalid(
            "truncate_prompt_tokens must be at least 1, or -1", "truncate_prompt_tokens", "invalid_value"
        )
    return tokens[-keep:]
