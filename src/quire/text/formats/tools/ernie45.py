"""ERNIE 4.5: a JSON object between tags."""

from quire.text.formats.shapes import JsonCall, ToolFormat

FORMAT = ToolFormat(
    "ernie45", (JsonCall(),), begin=("<tool_call>",), end="</tool_call>", pad="\n", joint="\n"
)
