"""Hermes, Qwen2.5, Qwen3, Granite 4: a JSON object between tags."""

from quire.text.formats.shapes import JsonCall, ToolFormat

FORMAT = ToolFormat("hermes", (JsonCall(),), begin=("<tool_call>",), end="</tool_call>", pad="\n", joint="\n")
