"""xLAM: a JSON list without a marker."""

from quire.text.formats.shapes import JsonCall, ToolFormat

FORMAT = ToolFormat(
    "xlam",
    (JsonCall(listed=True),),
    begin=("<tool_call>", "[TOOL_CALLS]"),
    end="</tool_call>",
    bare=("[",),
    marked=False,
)
