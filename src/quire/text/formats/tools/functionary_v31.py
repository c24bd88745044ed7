"""Functionary v3.1: JSON between tags that name the function."""

from quire.text.formats.shapes import NamedCall, ToolFormat

FORMAT = ToolFormat(
    "functionary_v31", (NamedCall(between=(">",)),), begin=("<function=",), end="</function>", joint="\n"
)
