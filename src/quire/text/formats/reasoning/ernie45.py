"""ERNIE 4.5 thinking: reasoning from the start, the response between tags."""

from quire.text.formats.shapes import ReasoningFormat

FORMAT = ReasoningFormat(
    "ernie45",
    ("<think>",),
    ("</think>",),
    opened=True,
    answer_begin=("<response>",),
    answer_end=("</response>",),
)
