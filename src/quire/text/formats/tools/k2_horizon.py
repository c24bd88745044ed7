"""K2 Horizon: keys and values between tags, inside a section; types and JSON where the template asks for them."""

from quire.text.formats.shapes import JsonCall, ParameterCall, ToolFormat

FORMAT = ToolFormat(
    "k2_horizon",
    (
        ParameterCall(
            key_begin="<ifm|arg_key>",
            key_end=("</ifm|arg_key>", "<ifm|arg_value>"),
            value_end="</ifm|arg_value>",
            type_tags=("<ifm|arg_type>", "</ifm|arg_type>"),
        ),
        JsonCall(),
    ),
    begin=("<ifm|tool_call>",),
    end="</ifm|tool_call>",
    section=("<ifm|tool_calls>", "</ifm|tool_calls>"),
    section_pad="\n",
    joint="\n",
)
