"""Granite 20B function calling: a JSON object per marker."""

from quire.text.formats.shapes import JsonCall, ToolFormat

FORMAT = ToolFormat("granite_20b_fc", (JsonCall(),), begin=("<function_call>",), joint=" ", pad=" ")
