"""Jamba, Hunyuan A13B, Apriel: a JSON list between tags."""

from quire.text.formats.shapes import JsonCall, ToolFormat

FORMAT = ToolFormat("jamba", (JsonCall(listed=True),), begin=("<tool_calls>",), end="</tool_calls>")
