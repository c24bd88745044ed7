"""Phi-4-mini: a JSON list."""

from quire.text.formats.shapes import JsonCall, ToolFormat

FORMAT = ToolFormat(
    "phi4_mini", (JsonCall(listed=True),), begin=("functools", "<|tool_call|>"), end="<|/tool_call|>"
)
