"""Hy3: keys and values between tags, inside a section."""

from quire.text.formats.shapes import ParameterCall, ToolFormat

FORMAT = ToolFormat(
    "hy_v3",
    (
        ParameterCall(
            name_end="<tool_sep>",
            key_begin="<arg_key>",
            key_end=("</arg_key>", "<arg_value>"),
            value_end="</arg_value>",
        ),
    ),
    begin=("<tool_call>",),
    end="</tool_call>",
    section=("<tool_calls>", "</tool_calls>"),
    section_pad="\n",
    joint="\n",
)
