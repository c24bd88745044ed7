"""LongCat-Flash: a JSON object between tags; newer models write keys and values."""

from quire.text.formats.shapes import JsonCall, ParameterCall, ToolFormat

FORMAT = ToolFormat(
    "longcat",
    (
        JsonCall(),
        ParameterCall(
            key_begin="<longcat_arg_key>",
            key_end=("</longcat_arg_key>", "<longcat_arg_value>"),
            value_end="</longcat_arg_value>",
        ),
    ),
    begin=("<longcat_tool_call>",),
    end="</longcat_tool_call>",
    pad="\n",
    joint="\n",
)
