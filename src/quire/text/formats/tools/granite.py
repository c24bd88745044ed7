"""Granite 3: a JSON list."""

from quire.text.formats.shapes import JsonCall, ToolFormat

FORMAT = ToolFormat("granite", (JsonCall(listed=True),), begin=("<|tool_call|>", "<tool_call>"), bare=("[",))
