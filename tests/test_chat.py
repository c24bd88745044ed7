"""The conversation of `quire chat` and the streams of servers, without a terminal."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from quire import LLM
from quire.cli import main
from quire.commands.chat.answer import AnswerPart, LocalAnswerer, Message, RemoteAnswerer
from quire.commands.chat.session import SETTINGS, Session
from quire.errors import PromptTooLongError, QuireError
from quire.text.formats.shapes import thinking


class Echo:
    """Answers with the last message, thinks first, and refuses conversations of more than `longest` messages."""

    name = "echo"

    def __init__(self, longest: int = 100) -> None:
        self.longest = longest
        self.asked: list[tuple[list[Message], dict[str, Any]]] = []
        self.breaks = False

    def answer(self, messages: list[Message], settings: dict[str, Any], more: bool) -> Iterator[AnswerPart]:
        self.asked.append(([dict(message) for message in messages], dict(settings)))
        if len(messages) > self.longest:
            raise PromptTooLongError("too long", len(messages), self.longest)
        yield AnswerPart(reasoning="hidden thought")
        yield AnswerPart(f"<{messages[-1]['content']}>")
        if self.breaks:
            raise QuireError("the connection broke off")
        yield AnswerPart(finish_reason="stop")

    def count(self, messages: list[Message]) -> tuple[int, int]:
        return len(messages), self.longest

    def switches_thinking(self) -> bool | None:
        return True


def contents(messages: list[Message]) -> list[str]:
    return [message["content"] for message in messages]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/set temprature 0", "there is no parameter temprature; did you mean temperature?"),
        ("/set temperature abc", "temperature must be a number"),
        ("/set temperature -1", "temperature must be a number"),
        ("/set top_k 1.5", "top_k must be an integer"),
        ("/set max_tokens 0", "max_tokens must be an integer >= 1"),
        ("/set min_tokens 900", "min_tokens must be at most max_tokens"),
        ("/set n 2", "there is no parameter n"),
        ("/set stop_token_ids [1.5]", "stop_token_ids must be a list of token ids"),
        ("/think maybe", "takes on or off"),
    ],
)
def test_a_slip_changes_nothing(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    echo = Echo()
    session = Session(echo, {"max_tokens": 256}, None)
    for message in ("I am Tom", line, "my name?"):
        assert session.take(message)
    assert said in capsys.readouterr().err
    assert contents(echo.asked[-1][0]) == ["I am Tom", "<I am Tom>", "my name?"]
    assert echo.asked[-1][1] == {"max_tokens": 256}


def test_no_value_of_a_setting_ends_the_chat() -> None:
    echo = Echo()
    session = Session(echo, {}, None)
    for name in SETTINGS:
        for value in (
            "",
            "x",
            "-1",
            "1e999",
            "NaN",
            "[1",
            "[[]]",
            '{"a": 1}',
            "null",
            '"\\ud800"',
            "true",
            "[null]",
        ):
            assert session.take(f"/set {name} {value}")
        session.take(f"/set {name}")
    session.take("still here")
    assert contents(echo.asked[-1][0]) == ["still here"]


def test_settings_are_set_shown_and_unset(capsys: pytest.CaptureFixture[str]) -> None:
    echo = Echo()
    session = Session(echo, {"max_tokens": 256}, None)
    for line in (
        "/set temperature 0",
        "/set stop END",
        '/set stop ["a", "b"]',
        "/set max_tokens",
        "/think off",
        "x",
    ):
        session.take(line)
    assert echo.asked[-1][1] == {"temperature": 0, "stop": ["a", "b"], "enable_thinking": False}
    capsys.readouterr()
    session.take("/set")
    shown = capsys.readouterr().err
    assert all(name in shown for name in SETTINGS)
    session.take("/think")
    session.take("y")
    assert "enable_thinking" not in echo.asked[-1][1]


def test_reasoning_is_marked_and_stays_out_of_the_history(capsys: pytest.CaptureFixture[str]) -> None:
    echo = Echo()
    session = Session(echo, {}, None)
    session.take("one")
    said = capsys.readouterr()
    assert said.out == "<one>\n"
    assert said.err == "Thinking...\nhidden thought\n...done thinking.\n\n"
    session.take("two")
    assert contents(echo.asked[-1][0]) == ["one", "<one>", "two"]


def test_hidden_reasoning_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    echo = Echo()
    session = Session(echo, {}, None, hide=True)
    session.take("one")
    assert tuple(capsys.readouterr()) == ("<one>\n", "thought for 0 s\n")
    for line in ("/reasoning show", "/reasoning maybe", "two"):
        session.take(line)
    said = capsys.readouterr()
    assert "hidden thought" in said.err
    assert "takes show or hide, not maybe" in said.err
    session.take("/reasoning hide")
    session.take("three")
    assert "hidden thought" not in capsys.readouterr().err


def test_a_template_without_a_switch_says_so(
    tiny_model: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    for template, known in (
        ("{{ messages[0].content }}", False),
        ("{% if thinking %}<think>{% endif %}", True),
        ("{{ messages[0].thinking }}", False),
        ("{% if enable_thinking is defined %}{% endif %}", True),
        ("{% if x %}{% elif thinking %}{% endif %}", True),
        ("{# thinking_budget #}{{ 'if thinking' }} or thinking", False),
    ):
        with LLM(tiny_model(), chat_template=template, max_model_len=64) as llm:
            assert llm.switches_thinking() is known
            if not known:
                Session(LocalAnswerer(llm), {}, None).take("/think off")
                assert "has no switch" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "chat",
                tiny_model(),
                "--chat-template",
                "{{ 1 }}",
                "--think",
                "on",
                "--max-model-len",
                "64",
                "-q",
                "x",
            ]
        )
    assert ended.value.code == 2
    assert "--think: the chat template of this model has no switch" in capsys.readouterr().err


def test_a_full_context_loses_its_oldest_turns(capsys: pytest.CaptureFixture[str]) -> None:
    echo = Echo(longest=4)
    session = Session(echo, {}, "Be brief.")
    for message in ("one", "two", "three"):
        session.take(message)
    assert contents(echo.asked[-1][0]) == ["Be brief.", "two", "<two>", "three"]
    assert capsys.readouterr().err.count("the oldest turn is left out") == 1
    echo.longest = 1
    session.take("alone")
    assert "too long (/new starts over)" in capsys.readouterr().err
    assert session.failed
    kept = Session(Echo(longest=2), {}, None, drop=False)
    for message in ("one", "two"):
        kept.take(message)
    assert "too long" in capsys.readouterr().err


def test_a_broken_answer_is_not_kept(capsys: pytest.CaptureFixture[str]) -> None:
    echo = Echo()
    session = Session(echo, {}, None)
    session.take("one")
    echo.breaks = True
    session.take("two")
    assert session.failed
    assert "broke off and is not kept" in capsys.readouterr().err
    session.take("/more")
    echo.breaks = False
    session.take("three")
    assert not session.failed
    assert contents(echo.asked[-1][0]) == ["one", "<one>", "three"]


def test_save_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session, file = Session(Echo(), {}, None), tmp_path / "chat.json"
    file.write_text("mine")
    session.take(f"/save {file}")
    assert file.read_text() == "mine"
    assert capsys.readouterr().err == f"{file} is there already: /save! {file} overwrites it\n"
    session.take(f"/save! {file}")
    assert json.loads(file.read_text()) == {"messages": []}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/save", "needs a file"),
        ("/save! ", "needs a file"),
        ("/save {}/no/chat.json", "{}/no/chat.json: No such file or directory"),
        ("/save! {}", "{}: Is a directory"),
        ("/load {}/no.json", "{}/no.json: No such file or directory"),
        ("/load {}/other.json", "{}/other.json is no conversation that /save wrote"),
        ("/load {}/binary", "{}/binary is no conversation that /save wrote"),
    ],
)
def test_files_that_cannot_be_used_are_told_in_words(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.json").write_text("[1]")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert Session(Echo(), {}, None).take(line.replace("{}", str(tmp_path)))
    told = capsys.readouterr().err
    assert said.replace("{}", str(tmp_path)) in told
    assert "Errno" not in told


class Streams(BaseHTTPRequestHandler):
    """A server whose streams end as `ends` says."""

    ends: tuple[str, ...] = ()
    announced = False
    owner = "someone"

    keys: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.keys.append(self.headers["Authorization"])
        card = {"id": "m", "max_model_len": 64, "owned_by": self.owner}
        self._send(json.dumps({"data": [card]}).encode())

    bodies: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._send("".join(f"data: {line}\n\n" for line in self.ends).encode(), 100 if self.announced else 0)

    def _send(self, data: bytes, missing: int = 0) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data) + missing))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Streams)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def chunk(**choice: Any) -> str:
    return json.dumps({"choices": [{"index": 0, **choice}]})


@pytest.mark.parametrize("announced", [False, True])
def test_a_stream_without_an_end_is_an_error(
    url: str, announced: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Streams, "announced", announced)
    monkeypatch.setattr(Streams, "ends", (chunk(text="half", delta={"content": "half"}),))
    for command in (["complete", "Once"], ["chat", "-q", "Once"]):
        with pytest.raises(SystemExit) as ended:
            main([*command, "--url", url])
        said = capsys.readouterr()
        assert ended.value.code == 1
        assert said.out.startswith("half")
        assert "broke off" in said.err
        assert "Traceback" not in said.err


@pytest.mark.parametrize("end", [chunk(delta={}, finish_reason="stop"), "[DONE]"])
def test_a_stream_with_an_end_is_whole(url: str, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Streams, "announced", False)
    thought = chunk(delta={"reasoning_content": "hm"})
    monkeypatch.setattr(Streams, "ends", (thought, chunk(delta={"content": "whole"}), end))
    parts = list(RemoteAnswerer(url, None, "").answer([], {}, False))
    assert "".join(part.text for part in parts) == "whole"
    assert "".join(part.reasoning for part in parts) == "hm"


def test_a_server_is_told_whether_to_think(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Streams, "ends", ("[DONE]",))
    monkeypatch.setattr(Streams, "bodies", [])
    answerer = RemoteAnswerer(url, None, "")
    list(answerer.answer([], {"enable_thinking": False, "seed": 1}, False))
    list(answerer.answer([], {"seed": 1}, False))
    first, second = Streams.bodies
    assert first["chat_template_kwargs"] == thinking(False)
    assert first["seed"] == 1
    assert not {"enable_thinking", "chat_template_kwargs"} & (
        second.keys() | first.keys() - {"chat_template_kwargs"}
    )


@pytest.mark.parametrize(
    ("prompt", "pieces", "out", "aside"),
    [
        ("Once", ["  a", " b <think>c</think>"], "  a b <think>c</think>\n", ""),
        ("Q:", ["<thi", "nk>\nhm", "</think>\n\nyes"], "yes\n", "hm"),
        ("Q:<think>", ["hm", "</think>yes"], "yes\n", "hm"),
        ("Q:", ["<think>cut"], "\n", "cut"),
        ("Q:", [("hm", "yes")], "yes\n", "hm"),
    ],
)
def test_complete_keeps_reasoning_out_of_its_output(
    url: str,
    prompt: str,
    pieces: list[Any],
    out: str,
    aside: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Streams, "announced", False)
    chunks = [
        chunk(text=p) if isinstance(p, str) else chunk(reasoning_content=p[0], text=p[1]) for p in pieces
    ]
    monkeypatch.setattr(Streams, "ends", (*chunks, "[DONE]"))
    main(["complete", prompt, "--url", url])
    said = capsys.readouterr()
    assert said.out == out
    assert said.err == (f"Thinking...\n{aside}\n...done thinking.\n\n" if aside else "")


def test_a_long_prompt_shows_its_progress(
    url: str, monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., str]
) -> None:
    progress = json.dumps(
        {"choices": [], "prompt_progress": {"total": 90, "processed": 64, "cache": 0, "time_ms": 1}}
    )
    monkeypatch.setattr(Streams, "announced", False)
    monkeypatch.setattr(Streams, "bodies", [])
    monkeypatch.setattr(Streams, "owner", "llamacpp")
    monkeypatch.setattr(Streams, "ends", (progress, chunk(delta={"content": "x"}), "[DONE]"))
    first, second = RemoteAnswerer(url, None, "").answer([], {}, False)
    assert (first.prompt_done, first.prompt_tokens, second.prompt_done) == (64, 90, None)
    assert Streams.bodies[-1]["return_progress"] is True
    monkeypatch.setattr(Streams, "owner", "someone")
    list(RemoteAnswerer(url, None, "").answer([], {}, False))
    assert "return_progress" not in Streams.bodies[-1]
    assert Streams.bodies[-1]["stream_options"] == {"include_usage": True}
    with LLM(tiny_model(), max_model_len=256, max_num_batched_tokens=64) as llm:
        talk = [{"role": "user", "content": "x" * 150}]
        parts = list(LocalAnswerer(llm).answer(talk, {"max_tokens": 2}, False))
    told = [(part.prompt_done, part.prompt_tokens) for part in parts if part.prompt_done is not None]
    assert [done for done, _ in told] == [0, 64, 128]
    assert {total for _, total in told} == {parts[-1].prompt_tokens}


def test_the_key_may_come_from_the_environment(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Streams, "keys", [])
    monkeypatch.setattr(Streams, "announced", False)
    monkeypatch.setattr(Streams, "ends", ("[DONE]",))
    monkeypatch.setenv("QUIRE_API_KEY", "kept")
    main(["complete", "Once", "--url", url])
    main(["chat", "-q", "Once", "--url", url, "--api-key", "given"])
    assert set(Streams.keys) == {"Bearer kept", "Bearer given"}


def test_a_local_model_s_reasoning_is_told_apart(tiny_model: Callable[..., str]) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if enable_thinking is not defined or enable_thinking %}<think>\n"
        "{% else %}<think>\n\n</think>\n\n{% endif %}"
    )
    with LLM(tiny_model(), chat_template=template, max_model_len=128) as llm:
        answerer, talk = LocalAnswerer(llm), [{"role": "user", "content": "Once"}]
        settings = {"max_tokens": 8, "temperature": 0.0}
        thought = list(answerer.answer(talk, settings, False))
        plain = list(answerer.answer(talk, {**settings, "enable_thinking": False}, False))
    assert "".join(part.reasoning for part in thought)
    assert not "".join(part.text for part in thought)
    assert "".join(part.text for part in plain)
    assert not "".join(part.reasoning for part in plain)
