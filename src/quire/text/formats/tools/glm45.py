"""GLM-4.5 and later, Laguna: keys and values between tags."""

from quire.text.formats.shapes import ParameterCall, ToolFormat

FORMAT = ToolFormat(
    "glm45",
    (ParameterCall(key_begin="<arg_key>", key_end=("</arg_key>", "<arg_value>"), value_end="</arg_value>"),),
    begin=("<tool_call>",),
    end="</tool_call>",
    joint="\n",
)
