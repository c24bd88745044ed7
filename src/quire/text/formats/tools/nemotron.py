"""Nemotron Nano and Super: a JSON list between tags."""

from quire.text.formats.shapes import JsonCall, ToolFormat

FORMAT = ToolFormat("nemotron", (JsonCall(listed=True),), begin=("<TOOLCALL>",), end="</TOOLCALL>")
