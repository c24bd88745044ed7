"""K2 Horizon: tags by effort, opened by the prompt."""

from quire.text.formats.shapes import ReasoningFormat

FORMAT = ReasoningFormat(
    "k2_horizon",
    ("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
    ("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
    opened=True,
)
