"""Gemma 4: an unquoted object whose strings have their own quotes."""

from quire.text.formats.shapes import LiteralCall, ToolFormat

FORMAT = ToolFormat("gemma4", (LiteralCall('<|"|>'),), begin=("<|tool_call>",), end="<tool_call|>")
