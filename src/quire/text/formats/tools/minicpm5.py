"""MiniCPM5: parameters between tags, plain or as CDATA."""

from quire.text.formats.shapes import ParameterCall, ToolFormat

FORMAT = ToolFormat(
    "minicpm5",
    (
        ParameterCall(
            name_end='">',
            key_begin='<param name="',
            key_end=('">',),
            value_end="</param>",
            after="</function>",
            gap="",
            cdata=True,
        ),
    ),
    begin=('<function name="',),
    joint="\n",
)
