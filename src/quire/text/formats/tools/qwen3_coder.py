"""Qwen3-Coder, Qwen3.5, Step-3.5, Nemotron 3: function and parameter tags."""

from quire.text.formats.shapes import ParameterCall, ToolFormat

FORMAT = ToolFormat(
    "qwen3_coder",
    (
        ParameterCall(
            before="<function=",
            name_end=">",
            key_begin="<parameter=",
            key_end=(">",),
            value_end="</parameter>",
            after="</function>",
            pad="\n",
        ),
    ),
    begin=("<tool_call>",),
    end="</tool_call>",
    bare=("<function=",),
    pad="\n",
    joint="\n",
)
