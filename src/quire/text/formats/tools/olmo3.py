"""Olmo 3: one Python call per line, between tags."""

from quire.text.formats.shapes import PythonCall, ToolFormat

FORMAT = ToolFormat(
    "olmo3",
    (PythonCall(bracketed=False),),
    begin=("<function_calls>",),
    end="</function_calls>",
    pad="\n",
    joint="\n",
)
