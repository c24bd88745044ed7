"""LFM2 and LFM2.5: Python calls between markers, or JSON on request."""

from quire.text.formats.shapes import JsonCall, PythonCall, ToolFormat

FORMAT = ToolFormat(
    "lfm2", (PythonCall(), JsonCall(listed=True)), begin=("<|tool_call_start|>",), end="<|tool_call_end|>"
)
