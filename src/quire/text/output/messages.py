"""Reads outputs that consist of messages: with channels in their headers, or with a recipient in front."""

from __future__ import annotations

import re

from quire.text.formats.shapes import Channels, NamedCall, Place, Recipients
from quire.text.output.calls import CallReader
from quire.text.output.events import Trimmed
from quire.text.output.literals import json_is_whole
from quire.text.output.reader import Emit, Reader, Steps, Unreadable, starts_of
from quire.text.output.tagged import NAME

MAX_HEADER = 512
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class MessageReader:
    """Reads messages into content, reasoning and, unless `calls` is None, calls. Text outside of any is content."""

    def __init__(
        self, reader: Reader, calls: CallReader | None, content: Trimmed, reasoning: Trimmed, place: Place
    ) -> None:
        self._reader = reader
        self._calls = calls
        self._content = content
        self._reasoning = reasoning
        self._place = place

    def channels(self, form: Channels) -> Steps[None]:
        """Read harmony messages. The prompt may end inside one, or after the role of a header."""
        reader, content = self._reader, self._content
        openings = (form.start, form.channel)
        if self._place != "start":
            yield from self._text(form, content if self._place == "answer" else self._reasoning)
        reader.mark = reader.at
        yield from reader.skip_space()
        marker = yield from reader.match(("to=",))  # the prompt ended inside the first header
        if marker is None:
            assert reader.mark is not None
            reader.at, reader.mark = reader.mark, None
        while True:
            if marker is None:
                marker = yield from reader.scan(openings, starts_of(openings), content.write)
            if not marker:
                return
            header = yield from self._header(form)
            if header is None:
                content.write(reader.since_mark())
            else:
                yield from self._message(form, header)
            marker = None

    def _header(self, form: Channels) -> Steps[str | None]:
        """Read the header that begins at the mark, up to the message; None if no message follows."""
        reader = self._reader
        assert reader.mark is not None
        stops = (form.message, *form.ends)
        begin = reader.at - reader.mark
        while True:
            stop = yield from reader.match(stops)
            if stop == form.message:
                text = reader.text[reader.mark : reader.at - len(stop)]
                reader.mark = None
                return text
            size = reader.at - reader.mark - begin
            if stop is not None or not (yield from reader.peek()) or size > MAX_HEADER:
                return None
            reader.at += 1

    def _message(self, form: Channels, header: str) -> Steps[None]:
        recipient = _RECIPIENT.search(header)
        name = "" if recipient is None or recipient[1] in form.people else recipient[1]
        channel = header.rpartition(form.channel)[2].strip()
        # A tool of the model's own is part of its reasoning.
        to_tool = bool(name) and not name.startswith(form.calls)
        sink = self._reasoning if to_tool or channel.startswith(form.reasoning) else self._content
        if self._calls is not None and name.startswith(form.calls) and len(name) > len(form.calls):
            self._content.touch()
            self._reasoning.touch()
            yield from self._call(form, self._calls, name.removeprefix(form.calls))
        else:
            sink.begin_part()
            yield from self._text(form, sink)

    def _text(self, form: Channels, sink: Trimmed) -> Steps[None]:
        """Read the text of a message into `sink`."""
        yield from self._until_end(form, sink.write)
        sink.touch()

    def _call(self, form: Channels, calls: CallReader, name: str) -> Steps[None]:
        calls.start(name)
        parts: list[str] = []

        def emit(text: str) -> None:
            parts.append(text)
            calls.argue(text)

        stop = yield from self._until_end(form, emit)
        text = "".join(parts)
        if stop and not text.strip():
            calls.argue("{}")
        # The token that ends a call also ends the output, and then is no part of its text.
        if stop or json_is_whole(text):
            calls.end()
        else:
            calls.break_off()
        self._reader.mark = None

    def _until_end(self, form: Channels, emit: Emit) -> Steps[str]:
        """Pass text to `emit` up to the end of the message, or to where the next one begins."""
        reader = self._reader
        stops = (*form.ends, form.start, form.channel)
        stop = yield from reader.scan(stops, starts_of(stops), emit)
        reader.mark = None
        if stop in (form.start, form.channel):
            reader.at -= len(stop)
        return stop

    def recipients(self, form: Recipients, body: NamedCall) -> Steps[None]:
        """Read messages that start with a recipient; the prompt ended with the marker before the first."""
        reader, content = self._reader, self._content
        markers = (form.marker,)
        at_start = self._place == "start"
        while True:
            if not at_start and not (yield from reader.scan(markers, starts_of(markers), content.write)):
                return
            if at_start:
                reader.mark = reader.at
            at_start = False
            offset = reader.at - (reader.mark or 0)
            name = yield from reader.whole_run(NAME)
            if name == form.answer and (yield from reader.match(("\n",))):
                reader.mark = None
                content.begin_part()
                continue
            reader.at = (reader.mark or 0) + offset
            if self._calls is not None:
                before = self._calls.num_calls
                try:
                    yield from self._calls.named(body)
                except Unreadable:
                    self._calls.break_off()
                if self._calls.num_calls > before:
                    content.touch()
            content.write(reader.since_mark())
