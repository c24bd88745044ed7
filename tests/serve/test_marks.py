"""`cache_control` in messages, chats and responses: a recurrent model keeps a state there, where the next goes on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from quire.serve.anthropic.protocol import MESSAGES
from quire.serve.fields.accept import accept
from quire.serve.marks import marks_of
from quire.serve.openai.chat_protocol import CHAT
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
    assert marks_of(front, [{"content": body.system}, *body.messages], text) == ends
    chat = {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief.", **MARK},  # as some clients write it
            *given["messages"],
        ],
    }
    accepted, _ = accept(CHAT, chat, ())
    assert marks_of(front, accepted.messages, text) == ends


@pytest.mark.parametrize("url", ["/v1/messages", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize(("mark", "least", "most"), [(True, 192, 208), (False, 0, 0)])
def test_the_second_request_with_a_marked_system_prompt_hits(
    mark: bool, least: int, most: int, url: str, tmp_path: Path
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
                body = asked("x" * 200, said * 40, mark)
                if url != "/v1/messages":
                    body["messages"].insert(0, {"role": "system", "content": body.pop("system")})
                if url == "/v1/responses":
                    body = {"model": "m", "max_output_tokens": 2, "input": body["messages"]}
                answer = http.post(url, json=body)
                assert answer.status_code == 200, answer.text
    finally:
        server.stop()
    usage = answer.json()["usage"]
    cached = {
        "/v1/messages": lambda: usage["cache_read_input_tokens"],
        "/v1/chat/completions": lambda: usage["prompt_tokens_details"]["cached_tokens"],
        "/v1/responses": lambda: usage["input_tokens_details"]["cached_tokens"],
    }
    assert least <= cached[url]() <= most
