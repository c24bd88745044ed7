"""Granite 3.3: think tags, and the response between tags."""

from quire.text.formats.shapes import ReasoningFormat

FORMAT = ReasoningFormat(
    "granite33", ("<think>",), ("</think>",), answer_begin=("<response>",), answer_end=("</response>",)
)
