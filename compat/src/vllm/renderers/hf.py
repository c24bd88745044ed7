"""The chat template of a tokenizer of transformers."""

from typing import Any


def resolve_chat_template(
    tokenizer: Any, chat_template: str | None, tools: list[dict[str, Any]] | None, **ignored: Any
) -> str | None:
    """Return the given template, else the tokenizer's own (for tools, if there are any), else None."""
    if chat_template is not None:
        return chat_template
    if not getattr(tokenizer, "chat_template", None):
        return None
    found: str = tokenizer.get_chat_template(None, tools=tools)
    return found


__all__ = ["resolve_chat_template"]
