"""Functionary v3.2: messages to the user or to functions."""

from quire.text.formats.shapes import NamedCall, Recipients, ToolFormat

FORMAT = ToolFormat(
    "functionary_v32", (NamedCall(between=("\n",)),), joint=">>>", recipients=Recipients(">>>", "all")
)
