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
from quire.text.formats.shapes import NamedCall, Place, ReasoningFormat, ToolFormat
from quire.text.output.calls import CallReader, Found
from quire.text.output.events import Event, Events, Parsed, Trimmed
from quire.text.output.messages import MessageReader
from quire.text.output.reader import Reader, Steps, Unreadable, starts_of
from quire.text.output.schemas import Functions, schemas

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
