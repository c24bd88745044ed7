"""Tool calls and reasoning out of a model's text: one incremental machine for all formats. Knows no HTTP, no tokens.

    parser = OutputParser(tool_format("hermes"), reasoning_format("qwen3"))
    for text in stream: events += parser.feed(text)
    events += parser.finish()

How a text is split never matters: the machine is one coroutine that asks for the next character and cannot see
where portions end. Reading a whole text is feeding it once.

What it makes of text that keeps to no format, so that no text is lost and nothing raises:

- A call begins when its name is known and its arguments begin as such do. Text that only looks like a call before
  that (a marker followed by something else) is content, markers included; reading goes on behind it.
- After that, the arguments are handed on as they come. Where they break off (the text ends, or a character comes that
  cannot be), the call ends with `complete` False and what follows is content.
- Arguments are bounded by brackets, not checked: `{"a": 1,, }` is handed on as it is. Raw control characters and
  unknown escapes in strings are made valid JSON; Python's and tagged arguments are written as JSON.
- After whole arguments, brackets and end markers that are missing and brackets that are too many before an end
  marker are forgiven; text between calls is content.
- Reasoning that never ends is reasoning. One that forgets its end before a call of a function that is offered ends
  there.
- Formats whose calls have no marker of their own (llama3_json, pythonic) have calls only of functions that are
  offered, where that is known.
- White space beside markers belongs to the format. All else is kept as it is, also where nothing is found.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import RequestError
from quire.text.calls import CallReader, Functions
from quire.text.channels import read_channels
from quire.text.events import Event, Events, Parsed, Trimmed
from quire.text.formats import ReasoningFormat, ToolFormat, reasoning_format, tool_format
from quire.text.reader import Reader, Steps, Unreadable, starts_of

# What may stand between a whole call and its end marker: brackets that are too many.
_SURPLUS = re.compile(r"[ \t\r\n}\]]+")


def parse(
    text: str,
    tools: str | ToolFormat | None = "hermes",
    reasoning: str | ReasoningFormat | None = None,
    functions: Sequence[Mapping[str, Any]] | None = None,
    reasoning_opened: bool | None = None,
) -> Parsed:
    """A whole output.

    `tools` and `reasoning` name formats, None looks for none. `functions` are what was offered, in OpenAI's shape.
    `reasoning_opened`: the prompt ended inside the reasoning. Raises ConfigError for a name that is not known.
    """
    parser = OutputParser(
        tool_format(tools) if isinstance(tools, str) else tools,
        reasoning_format(reasoning) if isinstance(reasoning, str) else reasoning,
        None if functions is None else schemas(functions),
        reasoning_opened,
    )
    parsed = Parsed()
    parsed.add(parser.feed(text))
    parsed.add(parser.finish())
    return parsed


def schemas(functions: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Names of functions in OpenAI's shape (`{"type": "function", "function": {...}}`) with their parameters."""
    found: dict[str, Mapping[str, Any]] = {}
    for i, tool in enumerate(functions):
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"tools[{i}] must be a function with a name", "tools")
        parameters = function.get("parameters")
        found[function["name"]] = parameters if isinstance(parameters, Mapping) else {}
    return found


class OutputParser:
    """Reads one output. `functions` (names with JSON Schemas of their parameters) are what was offered, if known.

    `tools` or `reasoning` None: that is not looked for. `opened` says whether the output begins inside the
    reasoning; None takes the format's own answer.
    """

    def __init__(
        self,
        tools: ToolFormat | None,
        reasoning: ReasoningFormat | None = None,
        functions: Functions | None = None,
        opened: bool | None = None,
    ) -> None:
        self._tools = tools
        self._knows_offered = functions is not None
        self._form = reasoning
        self._opened = opened if opened is not None else reasoning is not None and reasoning.opened
        self._reader = Reader()
        self._events = Events()
        self._call = CallReader(self._reader, self._events, functions)
        self._content = Trimmed(self._events.content)
        self._reasoning = Trimmed(self._events.reasoning)
        self._done = False
        self._steps = self._read()
        self._advance()

    def feed(self, text: str) -> list[Event]:
        """What `text`, which comes next, makes known."""
        self._reader.add(text)
        self._advance()
        return self._events.take()

    def finish(self) -> list[Event]:
        """What is left at the end of the text."""
        self._reader.ended = True
        self._advance()
        self._reasoning.finish()
        self._content.finish()
        return self._events.take()

    def _advance(self) -> None:
        if not self._done:
            try:
                next(self._steps)
            except StopIteration:
                self._done = True

    def _read(self) -> Steps[None]:
        for form in (self._tools, self._form):
            if form is not None and form.channels is not None:
                calls = self._call if self._tools is not None else None
                yield from read_channels(form.channels, self._reader, calls, self._content, self._reasoning)
                return
        if self._form is not None:
            yield from self._think(self._form)
        triggers = self._triggers()
        starts = starts_of(triggers)
        while marker := (yield from self._reader.scan(triggers, starts, self._content.write)):
            yield from self._calls(marker, self._content)

    def _triggers(self) -> tuple[str, ...]:
        """The texts at which a call may begin."""
        if self._tools is None:
            return ()
        section = () if self._tools.section is None else self._tools.section[:1]
        return (*section, *self._tools.begin, *self._tools.bare)

    def _think(self, form: ReasoningFormat) -> Steps[None]:
        """The reasoning at the beginning, if there is one."""
        reader = self._reader
        reader.mark = reader.at
        yield from reader.skip_space()
        if (yield from reader.match(form.begin)) is None:
            assert reader.mark is not None
            reader.at = reader.mark
            if not self._opened:
                reader.mark = None
                return
        reader.mark = None
        self._reasoning.touch()
        self._content.touch()
        markers = form.end + (self._triggers() if self._knows_offered else ())
        starts = starts_of(markers)
        while marker := (yield from reader.scan(markers, starts, self._reasoning.write)):
            if marker in form.end or (yield from self._calls(marker, self._reasoning)):
                reader.mark = None
                self._reasoning.touch()
                break

    def _calls(self, marker: str, sink: Trimmed) -> Steps[bool]:
        """Calls from `marker` on, which is read; what is none goes to `sink`. Whether there was a call."""
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
                while form.end and (yield from reader.run(_SURPLUS)):
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
        (self._content if begun else sink).write(reader.since_mark())
        return begun

    def _another(self, form: ToolFormat, in_section: bool) -> Steps[bool]:
        """Whether a further call follows at once; its begin is read."""
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
