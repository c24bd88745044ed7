"""`cache_control` in /v1/messages: a model with recurrent states keeps one there, where the next request goes on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from quire.serve.anthropic.marks import marks_of
from quire.serve.anthropic.protocol import MESSAGES
from quire.serve.fields.accept import accept
from tests.serve.running import start
from tests.tiny import write_checkpoint

MARK = {"cache_control": {"type": "ephemeral"}}


def asked(system: str, said: str, mark: bool = True) -> dict[str, Any]:
    return {
        "model": "m",
        "max_tokens": 2,
        "system": [{"type": "text", "text": system, **(MARK if mark else {})}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": said}]}],
    }


def test_marks_are_counted_in_the_rendered_text() -> None:
    front: Any = SimpleNamespace(encode=lambda text, add_special_tokens: list(text))
    given = asked(" Be brief. ", "Hello")
    given["messages"] += [
        {"role": "assistant", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": word, **MARK} for word in ("", "brief", "gone")],
        },
    ]
    body, _ = accept(MESSAGES, given, ())
    text = "<s>Be brief.</s><u>Hello</u><a>Be brief.</a><u>brief</u>"
    ends = (text.index("</s>"), text.index("brief", text.index("</s>")) + len("brief"))
    assert marks_of(front, body, text) == ends


@pytest.mark.parametrize(("mark", "least", "most"), [(True, 192, 208), (False, 0, 0)])
def test_the_second_request_with_a_marked_system_prompt_hits(
    mark: bool, least: int, most: int, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, "qwen3_5", linear_key_head_dim=40, linear_value_head_dim=40)
    server = start(
        maker="quire.client.start",
        model=str(tmp_path),
        served_model_name=("m",),
        kv_cache_memory_bytes=1 << 23,
    )
    try:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            for said in ("One", "Another"):
                answer = http.post("/v1/messages", json=asked("x" * 200, said * 40, mark))
                assert answer.status_code == 200, answer.text
    finally:
        server.stop()
    assert least <= answer.json()["usage"]["cache_read_input_tokens"] <= most
