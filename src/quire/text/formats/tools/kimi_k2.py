"""Kimi K2: numbered function names and JSON, inside a section."""

from quire.text.formats.shapes import NamedCall, ToolFormat

FORMAT = ToolFormat(
    "kimi_k2",
    (NamedCall(between=("<|tool_call_argument_begin|>",), prefix="functions.", numbered=True),),
    begin=("<|tool_call_begin|>",),
    end="<|tool_call_end|>",
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    call_id="functions.{name}:{index}",
)
