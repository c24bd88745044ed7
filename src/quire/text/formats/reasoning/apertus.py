"""Apertus: inner text between markers."""

from quire.text.formats.shapes import ReasoningFormat

FORMAT = ReasoningFormat("apertus", ("<|inner_prefix|>",), ("<|inner_suffix|>",))
