"""Stop strings end the content: not the reasoning, a call, or the markup between them."""

from __future__ import annotations

from typing import Any

import pytest

from quire.text.formats.registry import reasoning_format, tool_format
from quire.text.formats.shapes import Place
from quire.text.output.events import Parsed
from quire.text.output.parser import OutputParser
from quire.text.output.stops import AnswerStops
from quire.text.stop_strings import StopMatcher

OFFERED: dict[str, Any] = {"f": {"type": "object", "properties": {"a": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x STOP y"}}\n</tool_call>'
HARMONY = (
    "<|channel|>analysis<|message|>STOP<|end|><|start|>assistant<|channel|>final<|message|>Four. STOP five"
)


def run(
    text: str,
    stop: list[str],
    size: int = 1,
    tools: str | None = "hermes",
    reasoning: str = "qwen3",
    place: Place = "start",
    forced: bool = False,
    include: bool = False,
    ignored: int = 0,
) -> tuple[str, str | None, Parsed]:
    """What is shown of a text that comes in pieces, the stop string that ended it, and how it is read."""

    def parser() -> OutputParser:
        found = None if tools is None else tool_format(tools)
        return OutputParser(found, reasoning_format(reasoning), OFFERED, place, forced, True)

    stops = AnswerStops(parser, StopMatcher(stop))
    shown = held = ""
    stopped: str | None = None
    reader = parser()
    parsed = Parsed()
    for i in range(0, len(text), size):
        piece = text[i : i + size]
        match, whole = stops.feed(piece, ignore=i + size <= ignored), held + piece
        if match is None:
            keep = len(whole) - stops.held(include)
            given, held = whole[:keep], whole[keep:]
        else:
            end, stopped = match
            given = whole[: len(held) + end - (0 if include else len(stopped))]
        shown += given
        parsed.add(reader.feed(given))
        if stopped:
            break
    if stopped is None:
        match = stops.finish()
        if match is not None:
            end, stopped = match
            held = held[: len(held) + end - (0 if include else len(stopped))]
        shown += held
        parsed.add(reader.feed(held))
    parsed.add(reader.finish())
    return shown, stopped, parsed


CASES: list[tuple[str, dict[str, Any], str, str | None, int]] = [
    ("It is four. STOP five", {}, "It is four. ", "STOP", 0),
    ("<think>\nIt says STOP: hm\n</think>\n\nFour.", {}, "Four.", None, 0),
    ("<think>\nSTOP\n</think>\n\nFour. STOP five", {}, "Four. ", "STOP", 0),
    ("STOP\n</think>\n\nFour.", {"place": "reasoning"}, "Four.", None, 0),
    ("Look.\n" + CALL, {}, "Look.", None, 1),
    (CALL + "\nDone STOP", {}, "Done ", "STOP", 1),
    (CALL, {"stop": ["\n", "{", "tool_call", "f"]}, "", None, 1),
    (CALL, {"forced": True}, "", None, 1),
    ("<think>a\n\nb</think>\n\nFour.\n\nQ: five", {"stop": ["\n\n"]}, "Four.", "\n\n", 0),
    ("<think>a</think>\n\nFour.\n\n", {"stop": ["\n\n"]}, "Four.", "\n\n", 0),
    ("Four\nfive", {"stop": ["\n"]}, "Four", "\n", 0),
    ("Let me look.\n" + CALL, {"stop": ["\n"]}, "Let me look.", None, 1),
    ("Four" + "\n" * 80, {"stop": ["\n"]}, "Four", "\n", 0),
    ("STO" + CALL + "P", {}, "STOP", None, 1),
    ("a <tool_call> is STOP b", {}, "a <tool_call> is ", "STOP", 0),
    ("a <tool_ca STOP b", {"stop": ["<tool_ca"]}, "a ", "<tool_ca", 0),
    (HARMONY, {"tools": "openai", "reasoning": "openai_gptoss"}, "Four.", "STOP", 0),
]


@pytest.mark.parametrize(("text", "options", "content", "stopped", "num_calls"), CASES)
def test_where_an_output_stops(
    text: str, options: dict[str, Any], content: str, stopped: str | None, num_calls: int
) -> None:
    options = {"stop": ["STOP"], **options}
    wanted = None
    for size in (1, 2, 3, 7, len(text)):
        shown, found, parsed = run(text, size=size, **options)
        assert (parsed.content, found, len(parsed.calls)) == (content, stopped, num_calls), size
        assert all(call.complete for call in parsed.calls)
        assert text.startswith(shown)
        wanted = wanted or shown
        assert shown == wanted


def test_the_stop_string_may_be_shown() -> None:
    text = "<think>STOP</think>\n\nFour. STOP five"
    for size in (1, 3, len(text)):
        assert run(text, ["STOP"], size, include=True)[0].endswith("Four. STOP")


def test_the_first_tokens_may_be_exempt() -> None:
    assert run("a STOP b STOP c", ["STOP"], ignored=8)[0] == "a STOP b "


def test_calls_are_shown_while_they_come() -> None:
    def parser() -> OutputParser:
        return OutputParser(tool_format("hermes"), None, OFFERED, "start", False, True)

    stops = AnswerStops(parser, StopMatcher(["STOP", "\n"]))
    stops.feed('Look.\n<tool_call>\n{"name": "f", "arguments": {"a": "long text')
    assert stops.held(False) == 0
