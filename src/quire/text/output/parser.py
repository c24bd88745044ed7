"""Reads content, reasoning and tool calls out of a model's text: one incremental parser for all formats.

    parser = OutputParser(tool_format("hermes"), reasoning_format("qwen3"))
    for text in stream: events += parser.feed(text)
    events += parser.finish()

How a text is split does not matter: the parser is one coroutine that asks for the next character and cannot see
where pieces end. Parsing a whole text is feeding it once.

Text that does not keep to its format is never lost and never raises:

- A call starts once its name is known and its arguments begin properly. A marker that something else follows is
  content, and so is that text.
- From then on, arguments are emitted as they come. Where they break off (the text ends, or an impossible character
  comes), the call ends with `complete` False, and what follows is content.
- JSON arguments are bounded by brackets, not checked: `{"a": 1,, }` is passed on as it is. Raw control characters,
  unknown escapes and Python's words are made valid JSON. Python, tagged and other arguments are written as JSON.
- A call in Python's syntax starts when it is whole, or when the text ends in it: one that is malformed is content.
- Missing brackets and end markers after whole arguments, and surplus brackets before an end marker, are forgiven.
  Text between calls is content.
- Reasoning that never ends is reasoning, unless a call of an offered function begins: that ends it. A call in
  reasoning that does end later is quoted, and stays reasoning.
- Formats whose calls have no marker (llama3_json, pythonic, xlam) have calls of offered functions only, if those are
  known.
- White space beside markers belongs to the format. All other white space is kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.text.formats.registry import reasoning_format, tool_format
from quire.text.formats.shapes import Channels, NamedCall, Place, ReasoningFormat, Recipients, ToolFormat
from quire.text.output.calls import CallReader, Found
from quire.text.output.events import Event, Events, Parsed, Trimmed
from quire.text.output.literals import json_is_whole
from quire.text.output.reader import Emit, Reader, Steps, Unreadable, starts_of
from quire.text.output.schemas import Functions, schemas
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


__all__ = ["OutputParser", "parse", "schemas"]

# Brackets that may be surplus between a whole call and its end marker.
_SURPLUS = re.compile(r"[ \t\r\n}\]]+")


def parse(
    text: str,
    tools: str | ToolFormat | None = "hermes",
    reasoning: str | ReasoningFormat | None = None,
    functions: Sequence[Mapping[str, Any]] | None = None,
    place: Place | None = None,
) -> Parsed:
    """Parse a whole output.

    `tools` and `reasoning` name formats; None looks for none. `functions` were offered, in OpenAI's shape. `place` is
    where the prompt left off: before anything ("start"), inside the reasoning, or in the answer; None takes the
    format's default. Raises ConfigError for an unknown name.
    """
    parser = OutputParser(
        tool_format(tools) if isinstance(tools, str) else tools,
        reasoning_format(reasoning) if isinstance(reasoning, str) else reasoning,
        None if functions is None else schemas(functions),
        place,
    )
    parsed = Parsed()
    parsed.add(parser.feed(text))
    parsed.add(parser.finish())
    return parsed


class OutputParser:
    """Parses one output.

    `functions` (names with JSON Schemas of their parameters) were offered, None if unknown. `tools` or `reasoning`
    None: not looked for. `place` is where the prompt left off. `forced`: the output can only be calls, so other text
    is a call cut off before its name, and is dropped. `located`: `places` says where the content stood in the output.
    """

    def __init__(
        self,
        tools: ToolFormat | None,
        reasoning: ReasoningFormat | None = None,
        functions: Functions | None = None,
        place: Place | None = None,
        forced: bool = False,
        located: bool = False,
    ) -> None:
        self._tools = tools
        self._form = reasoning
        self._knows_offered = functions is not None
        default: Place = "reasoning" if reasoning is not None and reasoning.opened else "start"
        self._place: Place = default if place is None else place
        self._reader = Reader()
        self._events = Events()
        self._call = CallReader(self._reader, self._events, functions)
        self._forced_name = next(iter(functions), "") if forced and functions and len(functions) == 1 else ""
        self._dropped = False
        self._content = Trimmed(
            self._drop if forced else self._events.content,
            (lambda: self._reader.place) if located and not forced else None,
        )
        self._reasoning = Trimmed(self._events.reasoning)
        self._done = False
        self._steps = self._read()
        self._advance()

    @property
    def places(self) -> list[int]:
        """Where each character of the content so far stood in the output; -1 for those that it does not have."""
        return self._content.places

    @property
    def decided(self) -> int:
        """How many characters of the output are known to be content, or to be none."""
        undecided = 0 if self._reader.mark is None else self._reader.at - self._reader.mark
        known = self._reader.place - undecided
        return known if self._call.calling else int(min(known, self._content.decided))

    def feed(self, text: str) -> list[Event]:
        """Take the next piece of the output; return the events that it completes."""
        self._reader.add(text)
        self._advance()
        return self._events.take()

    def finish(self) -> list[Event]:
        """End the output; return the last events."""
        self._reader.ended = True
        self._advance()
        self._reasoning.finish()
        self._content.finish()
        if self._dropped and self._forced_name and not self._events.num_calls:
            self._events.start(self._forced_name)
            self._events.end(False)
        return self._events.take()

    def _drop(self, text: str) -> None:
        self._dropped = self._dropped or bool(text)

    def _advance(self) -> None:
        if not self._done:
            try:
                next(self._steps)
            except StopIteration:
                self._done = True

    def _read(self) -> Steps[None]:
        for form in (self._tools, self._form):
            if form is not None and (form.channels is not None or form.recipients is not None):
                yield from self._messages(form)
                return
        if self._form is not None:
            yield from self._think(self._form)
        yield from self._answer()

    def _messages(self, form: ToolFormat | ReasoningFormat) -> Steps[None]:
        calls = None if self._tools is None else self._call
        reader = MessageReader(self._reader, calls, self._content, self._reasoning, self._place)
        if form.channels is not None:
            yield from reader.channels(form.channels)
        elif form.recipients is not None:
            yield from reader.recipients(form.recipients, NamedCall(between=("\n",)))

    def _triggers(self) -> tuple[str, ...]:
        """List the texts at which a call may begin."""
        if self._tools is None:
            return ()
        section = () if self._tools.section is None else self._tools.section[:1]
        return (*section, *self._tools.begin, *self._tools.bare)

    def _think(self, form: ReasoningFormat) -> Steps[None]:
        """Read the reasoning at the beginning, if there is any."""
        reader = self._reader
        if self._place == "answer":
            return
        if form.in_content:
            self._content.write(form.begin[0] * (self._place == "reasoning"))
            return
        reader.mark = reader.at
        yield from reader.skip_space()
        if (yield from reader.match(form.begin)) is None:
            assert reader.mark is not None
            reader.at = reader.mark
            if self._place == "start":
                reader.mark = None
                return
        reader.mark = None
        yield from self._reason(form)

    def _reason(self, form: ReasoningFormat) -> Steps[None]:
        """Read reasoning whose begin is read, up to its end or the call that ends it."""
        reader = self._reader
        self._reasoning.begin_part()
        self._content.touch()
        markers = form.end + (self._triggers() if self._knows_offered else ())
        while marker := (yield from reader.scan(markers, starts_of(markers), self._reasoning.write)):
            if marker in form.end:
                reader.mark = None
                self._reasoning.touch()
                return
            if not (yield from self._begins_call(marker)):
                self._reasoning.write(reader.since_mark())
            elif (yield from reader.found_ahead(form.end)):
                self._reasoning.write(reader.since_mark())
                markers = form.end  # up to there, all calls are quoted
            else:
                yield from self._calls(marker, self._reasoning)
                reader.mark = None
                self._reasoning.touch()
                return

    def _begins_call(self, marker: str) -> Steps[bool]:
        """Whether a call of an offered function begins with `marker`, which has been read and stays read."""
        reader = self._reader
        self._call.only_looking = True
        try:
            yield from self._calls(marker, self._reasoning, release=False)
            found = False
        except Found:
            found = True
        self._call.only_looking = False
        assert reader.mark is not None
        if found:
            reader.at = reader.mark + len(marker)
        return found

    def _answer(self) -> Steps[None]:
        """Read the answer and its calls, without the markers that may enclose it."""
        reader, form = self._reader, self._form
        begin = () if form is None else form.answer_begin
        ends = () if form is None else form.answer_end
        again = form.begin if form is not None and form.anywhere else ()
        stray = form.end if form is not None and form.anywhere else ()
        if begin:
            reader.mark = reader.at
            yield from reader.skip_space()
            if (yield from reader.match(begin)) is None:
                assert reader.mark is not None
                reader.at = reader.mark
            else:
                self._content.touch()
            reader.mark = None
        markers = (*self._triggers(), *ends, *again, *stray)
        starts = starts_of(markers)
        while marker := (yield from reader.scan(markers, starts, self._content.write)):
            if marker in again:
                reader.mark = None
                assert form is not None
                yield from self._reason(form)
            elif marker in stray:
                reader.mark = None
            elif marker in ends:
                yield from self._answer_end(ends)
            else:
                yield from self._calls(marker, self._content)

    def _answer_end(self, ends: tuple[str, ...]) -> Steps[None]:
        """Drop an end marker just read if the output ends there or a call follows; else it is content."""
        reader = self._reader
        while True:
            yield from reader.skip_space()
            if not (yield from reader.peek()):
                break
            before = reader.at - (reader.mark or 0)
            found = yield from reader.match((*self._triggers(), *ends))
            if found in ends:
                continue
            if found is None:
                self._content.write(reader.since_mark())
                return
            reader.at = (reader.mark or 0) + before
            break
        reader.mark = None
        self._content.touch()

    def _calls(self, marker: str, sink: Trimmed, release: bool = True) -> Steps[bool]:
        """Read calls after `marker`, which has been read; other text goes to `sink`. Returns whether a call came."""
        reader, form, before = self._reader, self._tools, self._events.num_calls
        assert form is not None
        bare = marker in form.bare and marker not in form.begin
        self._call.only_offered = bare or sink is self._reasoning
        in_section = form.section is not None and marker == form.section[0]
        if bare:
            reader.at -= len(marker)
        try:
            if in_section:
                yield from reader.skip_space()
                if (yield from reader.match(form.begin)) is None:
                    raise Unreadable
            while True:
                yield from self._call.read(form, bare)
                fences = () if "`" in form.end else ("```",)
                while form.end and ((yield from reader.run(_SURPLUS)) or (yield from reader.match(fences))):
                    pass
                if form.end and (yield from reader.match((form.end,))):
                    reader.mark = reader.at
                if not (yield from self._another(form, in_section)):
                    break
        except Unreadable:
            self._call.break_off()
        begun = self._events.num_calls > before
        if begun:
            self._content.touch()
        if release:
            (self._content if begun else sink).write(reader.since_mark())
        return begun

    def _another(self, form: ToolFormat, in_section: bool) -> Steps[bool]:
        """Whether another call follows at once; if so, its begin has been read."""
        reader = self._reader
        yield from reader.skip_space()
        if in_section:
            assert form.section is not None
            if (yield from reader.match(form.section[1:])):
                reader.mark = reader.at
                return False
            return (yield from reader.match(form.begin)) is not None
        if not form.separators:
            return False
        if (yield from reader.match(tuple(form.separators))):
            yield from reader.skip_space()
        found = yield from reader.match(form.bare)
        reader.at -= len(found or "")
        return found is not None
