"""Apriel: a sentence opens the reasoning, a marker ends it."""

from quire.text.formats.shapes import ReasoningFormat

FORMAT = ReasoningFormat(
    "apriel",
    ("Here are my reasoning steps:",),
    ("[BEGIN FINAL RESPONSE]",),
    answer_end=("[END FINAL RESPONSE]",),
)
