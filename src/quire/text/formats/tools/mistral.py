"""Mistral up to tokenizer v7: a JSON list."""

from quire.text.formats.shapes import JsonCall, NamedCall, ToolFormat

FORMAT = ToolFormat(
    "mistral",
    (JsonCall(listed=True), NamedCall(between=("[ARGS]", ""), aside="[CALL_ID]")),
    begin=("[TOOL_CALLS]",),
    call_id="{hex9}",
)
