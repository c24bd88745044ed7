"""Llama 3.1 to 4: a JSON object without a marker."""

from quire.text.formats.shapes import JsonCall, ToolFormat

FORMAT = ToolFormat(
    "llama3_json",
    (JsonCall(key="parameters"),),
    begin=("<|python_tag|>",),
    bare=("{", "["),
    marked=False,
    separators=";,",
    joint="; ",
)
