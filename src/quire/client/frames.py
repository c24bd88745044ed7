"""Reads from a chat template how it frames messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.errors import RequestError
from quire.program.frames import PLAIN, Frames
from quire.text.tokenizer import Tokenizer

_MARK = "quire-program-mark"
Render = Callable[[list[dict[str, Any]]], str]


def frames_of(render: Render, tokenizer: Tokenizer) -> Frames:
    """Read the frames of a template, or return plain ones if it does not frame messages one by one."""
    try:
        return _read(render, tokenizer)
    except (RequestError, ValueError):
        return PLAIN


def _read(render: Render, tokenizer: Tokenizer) -> Frames:
    """Render two conversations and look between their messages. ValueError if messages are not framed one by one."""
    first = tokenizer.bos_token_id
    bos = "" if first is None else tokenizer.id_to_token(first) or ""

    def rendered(*roles: str) -> str:
        return render([{"role": role, "content": _MARK} for role in roles])

    alone, whole = rendered("user"), rendered("system", "user", "assistant", "user")
    before, to_user, to_assistant, to_user_again, after = whole.removeprefix(bos).split(_MARK)
    starts = {"system": before}
    for role, gap in (("user", to_user), ("assistant", to_assistant), ("user", to_user_again)):
        start = gap[len(after) :]
        if not gap.startswith(after) or starts.setdefault(role, start) != start:
            raise ValueError("messages are not framed one by one")
    opening, last = alone.removeprefix(bos).partition(_MARK)[0], after + starts["user"]
    default = None
    if opening.startswith(before) and opening.endswith(last):
        default = opening[len(before) : -len(last)]
    stop = tuple(text for text in (after.strip(),) if text)
    around = {role: (start, after) for role, start in starts.items()}
    is_added = tokenizer.encode("a")[:1] == [first]
    return Frames(around, default, stop, "" if is_added or not alone.startswith(bos) else bos)
