"""Reads messages with headers: reasoning, answers and calls each in a channel of their own. Knows one such output."""

from __future__ import annotations

import re

from quire.text.calls import CallReader
from quire.text.events import Trimmed
from quire.text.formats import Channels
from quire.text.reader import Emit, Reader, Steps, json_is_whole, starts_of

MAX_HEADER = 512
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def read_channels(
    form: Channels, reader: Reader, calls: CallReader | None, content: Trimmed, reasoning: Trimmed
) -> Steps[None]:
    """All messages. Text outside of any, and headers without a message, are content; without `calls` so are those."""
    openings = (form.start, form.channel)
    reader.mark = reader.at
    yield from reader.skip_space()
    marker = yield from reader.match(("to=",))  # the prompt ends inside the first header
    if marker is None:
        assert reader.mark is not None
        reader.at, reader.mark = reader.mark, None
    while True:
        if marker is None:
            marker = yield from reader.scan(openings, starts_of(openings), content.write)
        if not marker:
            return
        header = yield from _header(form, reader)
        if header is None:
            content.write(reader.since_mark())
        else:
            content.touch()
            reasoning.touch()
            yield from _message(form, reader, calls, header, content if _shown(form, header) else reasoning)
        marker = None


def _header(form: Channels, reader: Reader) -> Steps[str | None]:
    """The header that begins at the reader's mark, up to where the message begins; None where none does."""
    assert reader.mark is not None
    stops = (form.message, *form.ends)
    begin = reader.at - reader.mark
    while True:
        stop = yield from reader.match(stops)
        if stop == form.message:
            text = reader.text[reader.mark : reader.at - len(stop)]
            reader.mark = None
            return text
        if stop is not None or not (yield from reader.peek()) or reader.at - reader.mark - begin > MAX_HEADER:
            return None
        reader.at += 1


def _shown(form: Channels, header: str) -> bool:
    """Whether the message is for the user: neither reasoning nor to a tool of the model's own."""
    recipient = _RECIPIENT.search(header)
    to_tool = recipient is not None and not recipient[1].startswith(form.calls)
    channel = header.rpartition(form.channel)[2].strip()
    return not (to_tool or channel.startswith(form.reasoning))


def _message(
    form: Channels, reader: Reader, calls: CallReader | None, header: str, sink: Trimmed
) -> Steps[None]:
    """The message up to its end, or to where the next one begins."""
    stops = (*form.ends, form.start, form.channel)
    recipient = _RECIPIENT.search(header)
    name = "" if recipient is None else recipient[1]
    called = calls is not None and name.startswith(form.calls) and len(name) > len(form.calls)
    parts: list[str] = []
    emit: Emit = sink.write
    if called and calls is not None:
        calls.start(name.removeprefix(form.calls))

        def emit(text: str) -> None:
            parts.append(text)
            calls.argue(text)

    stop = yield from reader.scan(stops, starts_of(stops), emit)
    reader.mark = None
    if stop in (form.start, form.channel):
        reader.at -= len(stop)
    if called and calls is not None:
        text = "".join(parts)
        if stop and not text.strip():
            calls.argue("{}")
        # The token that ends a call ends the output too, and then is no part of its text.
        if stop or json_is_whole(text):
            calls.end()
        else:
            calls.break_off()
        reader.mark = None
    sink.touch()
