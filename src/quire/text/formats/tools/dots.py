"""dots3: parameters between tags, inside a section."""

from quire.text.formats.shapes import ParameterCall, ToolFormat

FORMAT = ToolFormat(
    "dots",
    (
        ParameterCall(
            name_end='">',
            key_begin='<parameter name="',
            key_end=('">',),
            value_end="</parameter>",
            after="</invoke>",
            pad="\n",
        ),
    ),
    begin=('<invoke name="',),
    section=("<dots_function_call>", "</dots_function_call>"),
    section_pad="\n",
    joint="\n",
)
