"""Prompts in all forms that vLLM takes, and the options of their tokenization."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from quire.client.request_checks import prompt_ids
from quire.client.requests import Front
from quire.errors import RequestError
from quire.fields import refusal
from quire.params import integers


class TextPrompt(TypedDict, total=False):
    """Prompt as text. `cache_salt` separates its prefix cache from other salts'."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """Prompt as token ids; `prompt` is their text, if it is known."""

    prompt_token_ids: list[int]
    prompt: str
    cache_salt: str


Prompt = str | Sequence[int] | Mapping[str, Any]
Message = dict[str, Any]
TOKENIZATION = ("truncate_prompt_tokens", "truncation_side", "add_special_tokens")


def as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """List one prompt or many: a list of ints is one prompt of token ids. RequestError for what is no prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    listed: Any = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if not isinstance(listed, Sequence) or isinstance(listed, bytes):
        raise refusal("prompt", prompts, "a text, token ids, a map with one of them, or a list of these")
    if not len(listed):
        return []
    return [listed] if integers(listed[:1]) is not None else listed


def as_conversations(messages: Any) -> list[list[Message]]:
    """List one conversation or many. RequestError for what is none."""
    many = (
        [messages] if not _is_list(messages) or not messages or isinstance(messages[0], Mapping) else messages
    )
    if not all(map(_is_list, many)):
        raise refusal("messages", messages, "a list of messages, or a list of such lists")
    return [list(conversation) for conversation in many]


def as_texts(name: str, texts: Any) -> list[str]:
    """List one text or many. RequestError for what is none."""
    listed = list(texts) if _is_list(texts) else [texts]
    if not all(isinstance(text, str) for text in listed):
        raise refusal(name, texts, "a text, or a list of texts")
    return listed


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def read_prompt(prompt: Prompt) -> tuple[str | None, list[int] | None]:
    """Read (text, token ids) of a prompt in any of its forms."""
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, Mapping):
        given = {
            name
            for name, value in prompt.items()
            if not (value is None or (isinstance(value, dict) and not value))
        }
        unknown = given - {"prompt", "prompt_token_ids", "cache_salt", "rendered"}
        if unknown or not given:
            raise RequestError(
                f"a prompt may contain prompt or prompt_token_ids, got {sorted(prompt)}", "prompt"
            )
        tokens = prompt.get("prompt_token_ids")
        text = prompt.get("prompt")
        if text is not None and not isinstance(text, str):
            raise refusal("prompt", text, "a text")
        return text, None if tokens is None else prompt_ids(tokens)
    return None, prompt_ids(prompt)


def salt_of(prompt: Prompt) -> str:
    """Read the salt that separates the prompt's prefix cache from others."""
    return str(prompt.get("cache_salt") or "") if isinstance(prompt, Mapping) else ""


def rendered_of(prompt: Prompt) -> Any:
    """Return the rendered conversation that the prompt is, if it is one."""
    return prompt.get("rendered") if isinstance(prompt, Mapping) else None


def tokens_of(front: Front, prompt: Prompt, kwargs: Mapping[str, Any] | None) -> tuple[str | None, list[int]]:
    """Return the text, if it is known, and the tokens of a prompt. `kwargs` as vLLM's tokenization_kwargs."""
    options = dict(kwargs or {})
    unknown = [name for name, value in options.items() if name not in TOKENIZATION and value is not None]
    if unknown:
        raise RequestError(
            f"tokenization_kwargs: {unknown[0]} is not supported: take {', '.join(TOKENIZATION)}",
            "tokenization_kwargs",
        )
    text, tokens = read_prompt(prompt)
    if tokens is None:
        tokens = front.encode(
            text or "", add_special_tokens=options.get("add_special_tokens", True) is not False
        )
    return text, front.truncated(
        tokens, options.get("truncate_prompt_tokens"), options.get("truncation_side")
    )


def no_media(kwargs: Mapping[str, Any] | None) -> None:
    """Refuse options of inputs other than text."""
    if kwargs:
        raise RequestError("mm_processor_kwargs: this model takes text alone", "mm_processor_kwargs")
