"""Seed-OSS: function and parameter tags."""

from quire.text.formats.shapes import ParameterCall, ToolFormat

FORMAT = ToolFormat(
    "seed_oss",
    (
        ParameterCall(
            before="<function=",
            name_end=">",
            key_begin="<parameter=",
            key_end=(">",),
            value_end="</parameter>",
            after="</function>",
        ),
    ),
    begin=("<seed:tool_call>",),
    end="</seed:tool_call>",
    pad="\n",
    joint="\n",
)
