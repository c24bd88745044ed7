"""Gemma 4: the channel `thought`."""

from quire.text.formats.shapes import ReasoningFormat

FORMAT = ReasoningFormat("gemma4", ("<|channel>thought",), ("<channel|>",))
