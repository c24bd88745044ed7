"""Command R7B, Command A and later: markers around reasoning and response."""

from quire.text.formats.shapes import ReasoningFormat

FORMAT = ReasoningFormat(
    "cohere_command3",
    ("<|START_THINKING|>",),
    ("<|END_THINKING|>",),
    answer_begin=("<|START_RESPONSE|>", "<|START_TEXT|>"),
    answer_end=("<|END_RESPONSE|>", "<|END_TEXT|>"),
)
