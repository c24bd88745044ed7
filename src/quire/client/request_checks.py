"""Checks of a request against its model: prompt, parameters, room. Knows no tokenizer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import msgspec

from quire.errors import PromptTooLongError, RequestError
from quire.params import SamplingParams, integers, token_lists
from quire.types import ModelCard

if TYPE_CHECKING:
    from quire.logits_processor import ProcessorClass

TOKENS_OF = {"logprobs": "logprob_token_ids", "prompt_logprobs": "prompt_logprob_token_ids"}
MAX_ASKED_TOKENS = 128


def prompt_ids(prompt: object) -> list[int]:
    """Read the token ids of a prompt. RequestError if it holds something else."""
    ids = integers(prompt)
    if ids is None:
        raise RequestError(f"the prompt must be text or token ids, got {prompt!r:.80}", "prompt")
    return ids


def check_tokens(tokens: Sequence[int], info: ModelCard) -> None:
    """Raise RequestError for a prompt that is empty or has ids outside the vocabulary."""
    if not tokens:
        raise RequestError("the prompt is empty: pass at least one token", "prompt")
    for token in tokens:
        if type(token) is not int or not 0 <= token < info.vocab_size:
            raise RequestError(
                f"token id {token!r} is outside the vocabulary (0 to {info.vocab_size - 1})", "prompt"
            )


def check_ids(name: str, tokens: Collection[int], size: int, whose: str = "") -> None:
    """Raise RequestError, naming the first, if ids in the field `name` are outside a vocabulary of that size."""
    if max(tokens, default=0) >= size:
        token = next(token for token in tokens if token >= size)
        raise RequestError(
            f"{name}: token id {token} is outside the vocabulary (0 to {size - 1}){whose}", name
        )


def check_params(params: SamplingParams, info: ModelCard, has_tokenizer: bool) -> None:
    """Raise RequestError for parameters that this model, or a text without tokenizer, cannot have."""
    vocab = info.vocab_size
    if params.min_tokens and params.allowed_token_ids is not None:
        ends = {*info.eos_token_ids, *(params.stop_token_ids or ())}
        if ends.issuperset(params.allowed_token_ids):
            raise RequestError(
                "allowed_token_ids holds only tokens that end the output, which min_tokens forbids: allow others",
                "allowed_token_ids",
            )
    for name, tokens in token_lists(params):
        check_ids(name, tokens, vocab)
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name) or 0
        named = len(getattr(params, TOKENS_OF[name]) or ())
        if named > MAX_ASKED_TOKENS:
            raise RequestError(
                f"{TOKENS_OF[name]} has {named} tokens, the most is {MAX_ASKED_TOKENS}", TOKENS_OF[name]
            )
        if (vocab if wanted == -1 else wanted) > info.max_logprobs:
            raise RequestError(
                f"{name} asks for {wanted if wanted != -1 else 'all'} entries per token, the most is "
                f"{info.max_logprobs} (--max-logprobs)",
                name,
            )
    if not has_tokenizer and params.structured_outputs is not None:
        raise RequestError("structured outputs need a tokenizer", "structured_outputs")
    if not has_tokenizer and (params.stop or params.bad_words):
        raise RequestError("stop strings and bad words need a tokenizer: use stop_token_ids", "stop")


def check_possible(params: SamplingParams, bad_words: tuple[tuple[int, ...], ...], info: ModelCard) -> None:
    """Raise RequestError if bad_words leave none of the tokens, or choices, that the request allows."""
    if not bad_words:
        return
    banned = {word[0] for word in bad_words if len(word) == 1}
    if params.min_tokens:
        banned.update(info.eos_token_ids, params.stop_token_ids or ())
    if params.allowed_token_ids is not None and banned.issuperset(params.allowed_token_ids):
        raise RequestError("bad_words forbid every token of allowed_token_ids: allow others", "bad_words")
    choices = None if params.structured_outputs is None else params.structured_outputs.choice
    if choices and all(any(word in choice for word in params.bad_words or ()) for choice in choices):
        raise RequestError("every choice has a bad word in it: leave one of them out", "bad_words")


def for_processors(
    params: SamplingParams,
    processors: Sequence[ProcessorClass],
    takes_functions: bool,
    processed_logprobs: bool,
) -> SamplingParams:
    """Have the engine's processors check the parameters; drop drafts if Python reads each row."""
    if params.logits_processors and not takes_functions:
        raise RequestError(
            "logits_processors are functions of this process, and the engine runs in another: use LLM, or name a "
            "class by --logits-processors and steer it by extra_args",
            "logits_processors",
        )
    for kind in processors:
        if hasattr(kind, "validate_params"):
            try:
                kind.validate_params(params)
            except ValueError as error:
                raise RequestError(f"{kind.__name__}: {error}", "extra_args") from error
    if params.logits_processors or processors or (params.wants_logprobs and processed_logprobs):
        return msgspec.structs.replace(params, speculative_decoding=False)
    return params


def room_after(tokens: Sequence[int], info: ModelCard) -> int:
    """Return how many tokens of output fit after the prompt. PromptTooLongError if none does."""
    count, longest = len(tokens), info.max_input_len
    if longest is not None and count > longest:
        raise PromptTooLongError(
            f"This engine's maximum context length is {longest} tokens of prompt, and the prompt has {count}: "
            "shorten it or build the engine with a larger --max-input-len",
            count,
            longest,
        )
    length = info.max_model_len
    if count >= length:
        raise PromptTooLongError(
            f"This model's maximum context length is {length} tokens, including at least one of output, and the "
            f"prompt has {count} tokens: shorten it{' or raise --max-model-len' if info.grows else ''}",
            count,
            length - 1,
        )
    return length - count


def scored_from(params: SamplingParams, num_tokens: int) -> int:
    """Return the first token of the prompt whose successors are scored."""
    start = params.prompt_logprob_start or 0
    if start >= num_tokens:
        raise RequestError(
            f"prompt_logprob_start is {start}, but the prompt has {num_tokens} tokens", "prompt_logprob_start"
        )
    return max(0, start - 1)
