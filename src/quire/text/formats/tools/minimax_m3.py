"""MiniMax M3: arguments as nested tags, each behind a marker."""

from quire.text.formats.shapes import NestedCall, ToolFormat

FORMAT = ToolFormat(
    "minimax_m3",
    (NestedCall(prefix="]<]minimax[>[", name_end='">', after="]<]minimax[>[</invoke>"),),
    begin=(']<]minimax[>[<invoke name="',),
    section=("]<]minimax[>[<tool_call>", "]<]minimax[>[</tool_call>"),
    section_pad="\n",
    joint="\n",
)
