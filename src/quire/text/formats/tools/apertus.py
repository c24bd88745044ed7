"""Apertus: a list of objects keyed by the function's name."""

from quire.text.formats.shapes import KeyedCall, ToolFormat

FORMAT = ToolFormat("apertus", (KeyedCall(),), begin=("<|tools_prefix|>",), end="<|tools_suffix|>")
