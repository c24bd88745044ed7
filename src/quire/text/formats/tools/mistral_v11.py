"""Mistral from tokenizer v11 on: a name and JSON per marker."""

from quire.text.formats.shapes import JsonCall, NamedCall, ToolFormat

FORMAT = ToolFormat(
    "mistral_v11",
    (NamedCall(between=("[ARGS]", ""), aside="[CALL_ID]"), JsonCall()),
    begin=("[TOOL_CALLS]",),
    call_id="{hex9}",
)
