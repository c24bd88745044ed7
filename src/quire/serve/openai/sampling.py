"""Read the SamplingParams that a body asks for, over the model's defaults."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.client.requests import Front
from quire.params import BeamRules, RepetitionDetectionParams, SamplingParams
from quire.serve.errors import invalid
from quire.serve.openai.protocol import SamplingFields
from quire.serve.openai.structured import constraint_of

# Fields that bodies and SamplingParams share by name, except those whose meaning depends on the endpoint.
_SHARED = set(SamplingParams.__struct_fields__) & set(SamplingFields.__struct_fields__)
_SHARED -= {"max_tokens", "logit_bias", "structured_outputs", "repetition_detection", "prediction"}


def sampling_params(
    front: Front, body: SamplingFields, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Raises RequestError naming the field whose value is not allowed."""
    given: dict[str, Any] = {name: value for name in _SHARED if (value := getattr(body, name)) is not None}
    if body.logit_bias:
        given["logit_bias"] = {_token_id(key): value for key, value in body.logit_bias.items()}
    if body.prediction is not None:
        given["prediction"] = body.prediction.text
    if body.logprob_token_ids is not None and logprobs is None:
        raise invalid("logprob_token_ids needs logprobs", "logprob_token_ids", "invalid_value")
    if body.vllm_xargs:
        given["extra_args"] = body.vllm_xargs
    if body.repetition_detection is not None:
        given["repetition_detection"] = RepetitionDetectionParams(
            **msgspec.structs.asdict(body.repetition_detection)
        )
    given |= _beam(body)
    if logprobs is not None:
        given["flat_logprobs"] = True  # many samples would hold millions of objects
    return front.default_params(
        max_tokens=max_tokens, logprobs=logprobs, structured_outputs=constraint_of(body), **given
    )


def _beam(body: SamplingFields) -> dict[str, Any]:
    """Read the beam search that a body asks for, as a field of SamplingParams."""
    if not body.use_beam_search:
        return {}
    if body.stream:
        message = "a beam search has nothing to stream until it ends: leave stream out"
        raise invalid(message, "stream", "invalid_value")
    rules = BeamRules(
        beam_width=body.beam_width or body.n or 1,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=body.early_stopping,
        num_beam_groups=1 if body.num_beam_groups is None else body.num_beam_groups,
        diversity_penalty=body.diversity_penalty or 0.0,
        no_repeat_ngram_size=body.no_repeat_ngram_size or 0,
    )
    return {"beam": rules}


def _token_id(key: str) -> int:
    if key.isascii() and key.isdecimal() and len(key) < 12:
        return int(key)
    raise invalid(f"logit_bias: {key[:32]!r} is not a token id", "logit_bias", "invalid_value")


def truncated(tokens: list[int], body: SamplingFields, max_tokens: int | None, longest: int) -> list[int]:
    """Cut the prompt to `truncate_prompt_tokens`; -1 keeps what leaves room for `max_tokens` of output, or for one."""
    limit = body.truncate_prompt_tokens
    if limit is None:
        return tokens
    if limit > longest:
        message = f"truncate_prompt_tokens must be at most the model's maximum context length of {longest}"
        raise invalid(message, "truncate_prompt_tokens", "invalid_value")
    keep = longest - min(max_tokens or 1, longest - 1) if limit == -1 else limit
    if keep < 1:
        raise invalid(
            "truncate_prompt_tokens must be at least 1, or -1", "truncate_prompt_tokens", "invalid_value"
        )
    return tokens[:keep] if body.truncation_side == "right" else tokens[-keep:]
