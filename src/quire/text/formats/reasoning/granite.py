"""Granite 3.2: sentences announce the reasoning and the response."""

from quire.text.formats.shapes import ReasoningFormat

FORMAT = ReasoningFormat(
    "granite",
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)
