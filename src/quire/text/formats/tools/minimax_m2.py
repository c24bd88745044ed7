"""MiniMax M2: parameters between tags, inside a section."""

from quire.text.formats.shapes import ParameterCall, ToolFormat

FORMAT = ToolFormat(
    "minimax_m2",
    (
        ParameterCall(
            name_end='">',
            key_begin='<parameter name="',
            key_end=('">',),
            value_end="</parameter>",
            after="</invoke>",
        ),
    ),
    begin=('<invoke name="',),
    section=("<minimax:tool_call>", "</minimax:tool_call>"),
    section_pad="\n",
    joint="\n",
)
