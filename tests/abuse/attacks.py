"""Requests that try to hold up the users beside them. Each is what one user may send, or a flood of it."""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

SECONDS = 10.0
USER, ATTACKER, OPERATOR = "user", "attacker", "operator"  # API keys
HELLO = [{"role": "user", "content": "hello"}]


def post(url: str, path: str, body: bytes, key: str = ATTACKER) -> None:
    """Send a body and read the whole answer, for at most SECONDS."""
    with contextlib.suppress(httpx.HTTPError):
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        httpx.post(url + path, content=body, headers=headers, timeout=SECONDS)


def flood(url: str, start: bytes, piece: bytes, total: int) -> None:
    """Send `start`, then `piece` again and again."""
    address = urlsplit(url)
    with (
        contextlib.suppress(OSError),
        socket.create_connection((address.hostname, address.port)) as connection,
    ):
        connection.sendall(start)
        for _ in range(total // len(piece)):
            connection.sendall(piece)


def unread(url: str, data: bytes) -> None:
    """Ask for a stream, and read it only after a while."""
    address = urlsplit(url)
    with (
        contextlib.suppress(OSError),
        socket.create_connection((address.hostname, address.port), timeout=SECONDS) as connection,
    ):
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += f"authorization: Bearer {ATTACKER}\r\n"
        connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        time.sleep(SECONDS / 2)
        end = time.monotonic() + SECONDS / 2
        while time.monotonic() < end and connection.recv(1 << 20):
            pass


def idle(url: str) -> None:
    """Thousands of connections that send nothing, or half a head."""
    address = urlsplit(url)
    held = []
    with contextlib.suppress(OSError):
        for i in range(900):
            held.append(socket.create_connection((address.hostname, address.port)))
            held[-1].sendall(b"GET / HT" if i % 2 else b"")
    for connection in held:
        connection.close()


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def sends(path: str, **fields: Any) -> Callable[[str], None]:
    return lambda url: post(url, path, body(**fields))


def sends_text(path: str, start: str, piece: str, count: int, end: str) -> Callable[[str], None]:
    """A body with one part repeated: quicker to make than by encoding values."""
    return lambda url: post(url, path, (start + piece * count + end).encode())


def sends_again(path: str, times: int, **fields: Any) -> Callable[[str], None]:
    """The same body again and again, for at most SECONDS."""

    def send(url: str) -> None:
        data, end = body(**fields), time.monotonic() + SECONDS
        for _ in range(times):
            if time.monotonic() < end:
                post(url, path, data)

    return send


def loads(url: str) -> None:
    """Adapters of many modules with many patterns, which cannot be loaded, and one that can, by many names."""
    root = Path(tempfile.gettempdir()) / ADAPTERS
    end = time.monotonic() + SECONDS
    for number in range(200):
        if time.monotonic() > end:
            return
        path = root / f"{number % 3}"
        if not path.exists():
            path.mkdir(parents=True)
            patterns = {f"x{i}.*y": 4 for i in range(4000)}
            config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "rank_pattern": patterns}
            (path / "adapter_config.json").write_text(json.dumps(config))
            one = {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}
            header = json.dumps({f"base_model.model.m{i}.lora_A.weight": one for i in range(50_000)}).encode()
            data = len(header).to_bytes(8, "little") + header + b"\0" * 4
            (path / "adapter_model.safetensors").write_bytes(data)
        post(url, "/v1/load_lora_adapter", body(lora_name=f"a{number}", lora_path=str(path)), OPERATOR)


ADAPTERS = "quire-abuse-adapters"
PROGRAMS = "/v1/programs"


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def select(count: int, size: int) -> dict[str, Any]:
    choices = [(f"{i} " + LONG * (size // len(LONG) + 1))[:size] for i in range(count)]
    return {"type": "select", "name": "v", "choices": choices}


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = "Once upon a time there was a little girl who liked to play. "
ATTACKS: dict[str, Callable[[str], None]] = {
    "a header that never ends": lambda url: flood(
        url, b"GET /health HTTP/1.1\r\nx: ", b"a" * 65536, 60 << 20
    ),
    "header lines without end": lambda url: flood(url, b"GET / HTTP/1.1\r\n", b"a: b\r\n" * 9000, 60 << 20),
    "trailers without end": lambda url: flood(
        url,
        b"POST /tokenize HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n",
        b"a: b\r\n" * 9000,
        60 << 20,
    ),
    "pipelined requests": lambda url: flood(url, b"", b"GET /health HTTP/1.1\r\n\r\n" * 2000, 20 << 20),
    "900 idle connections": idle,
    "n=1024, no end": sends(COMPLETIONS, prompt="hello", n=1024, max_tokens=900, ignore_eos=True),
    "n=1024, 200 tokens": sends(COMPLETIONS, prompt="hello", n=1024, max_tokens=200, ignore_eos=True),
    "n=1024 with logprobs": sends(
        COMPLETIONS, prompt="hello", n=1024, max_tokens=40, logprobs=20, ignore_eos=True
    ),
    "n=1024, long stop strings": sends(COMPLETIONS, prompt="hello", n=1024, stop=["ab" * 500] * 16),
    "a stream that nobody reads": lambda url: unread(
        url, body(prompt="hello", n=1024, max_tokens=200, logprobs=5, ignore_eos=True, stream=True)
    ),
    "1024 prompts, no end": sends(COMPLETIONS, prompt=[LONG] * 1024, max_tokens=900, ignore_eos=True),
    "bad_words, 300,000": sends(COMPLETIONS, prompt="a", bad_words=[f"w{i}" for i in range(300_000)]),
    "bad_words, the most": sends(COMPLETIONS, prompt="a", bad_words=[f"w{i}" for i in range(4096)]),
    "bad_words, five of 800 kB": sends(COMPLETIONS, prompt="a", bad_words=["ab" * 400_000] * 5),
    "logit_bias, 2 million": sends_text(
        COMPLETIONS, '{"prompt": "a", "logit_bias": {', '"1": 1, ', 2_000_000, '"2": 1}}'
    ),
    "logit_bias, the most": sends(
        COMPLETIONS, prompt="a", n=64, logit_bias={str(i % 4096): 1 for i in range(16384)}
    ),
    "10 million empty messages": sends_text(CHAT, '{"messages": [{}', ",{}", 10_000_000, "]}"),
    "40,000 messages": sends(CHAT, messages=HELLO * 40_000),
    "a message of 20 MB": sends(CHAT, messages=[{"role": "user", "content": "hello " * 3_400_000}]),
    "1.5 million metadata keys": sends_text(
        CHAT,
        '{"messages": [{"role": "user", "content": "a"}], "metadata": {',
        '"a": "", ',
        1_500_000,
        '"b": ""}}',
    ),
    "100,000 unknown fields": sends(COMPLETIONS, prompt="a", **{f"zq{i}": 1 for i in range(100_000)}),
    "embeddings of 2 million": sends_text("/v1/embeddings", '{"input": ["a"', ',"a"', 2_000_000, "]}"),
    "embeddings of 4096": sends("/v1/embeddings", input=[LONG] * 4096),
    "scores of 3,000 texts": sends("/score", text_1=LONG, text_2=[LONG] * 3000),
    "a tokenization of 20 MB": sends("/tokenize", prompt="hello " * 3_400_000),
    "a tokenization of 1 MB": sends("/tokenize", prompt="hello " * 170_000),
    "select of 500 long choices": sends(
        COMPLETIONS,
        prompt="a",
        structured_outputs={"choice": [f"{i} {LONG * 25}" for i in range(500)], "select": True},
    ),
    "select of 3,000 short ones": sends(
        COMPLETIONS, prompt="a", structured_outputs={"choice": [f"{i}" for i in range(3000)], "select": True}
    ),
    "JSON 100,000 deep": lambda url: post(url, CHAT, b"[" * 100_000),
    "token ids, a million": sends(COMPLETIONS, prompt=[1] * 1_000_000),
    "allowed ids, 900,000 x 256": sends(
        COMPLETIONS, prompt="a", n=256, max_tokens=60, allowed_token_ids=[i % 4096 for i in range(900_000)]
    ),
    "bad_words, the most x 64": sends(
        COMPLETIONS,
        prompt="a",
        n=64,
        max_tokens=200,
        bad_words=[f"w{i}" for i in range(4096)],
        ignore_eos=True,
    ),
    "a prediction of 480 kB x 1024": sends(
        COMPLETIONS,
        prompt="hello",
        n=1024,
        max_tokens=40,
        prediction={"type": "content", "content": LONG * 8000},
        ignore_eos=True,
    ),
    "logit_bias, 4,000 x 1000": sends(
        COMPLETIONS, prompt="a", n=1000, max_tokens=20, logit_bias={str(i): 1 for i in range(4000)}
    ),
    "1,000 prompts with 4,000 ids": sends(
        COMPLETIONS, prompt=["hello"] * 1000, max_tokens=8, allowed_token_ids=list(range(4000))
    ),
    "all log-probabilities": sends(COMPLETIONS, prompt=LONG * 30, max_tokens=4, prompt_logprobs=-1),
    "beams, the most": sends(
        COMPLETIONS, prompt="a", use_beam_search=True, beam_width=256, max_tokens=30, ignore_eos=True
    ),
    "select in 16 lanes": sends(
        PROGRAMS,
        steps=[text("a"), {"type": "fork", "name": "f", "branches": [[text("b "), select(256, 2700)]] * 16}],
    ),
    "4,096 steps on a long text": sends(
        PROGRAMS,
        steps=[text(LONG * 250), {"type": "repeat", "times": 1000, "steps": [text("x")] * 4}],
    ),
    "256 lanes of gens": sends(
        PROGRAMS,
        steps=[
            {
                "type": "fork",
                "name": f"f{i}",
                "branches": [[text(LONG), {"type": "gen", "max_tokens": 20}]] * 63,
            }
            for i in range(4)
        ],
    ),
    "300 sessions": sends_again(PROGRAMS, 300, steps=[text("x")], keep=True),
    "adapters": loads,
}


def attack(name: str, url: str) -> None:
    """Run one attack against the server at `url`."""
    ATTACKS[name](url)
