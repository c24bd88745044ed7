"""LongCat-Flash-Thinking: its own think tags."""

from quire.text.formats.shapes import ReasoningFormat

FORMAT = ReasoningFormat("longcat", ("<longcat_think>",), ("</longcat_think>",))
