"""Step3: parameters between tags, inside a section."""

from quire.text.formats.shapes import ParameterCall, ToolFormat

FORMAT = ToolFormat(
    "step3",
    (
        ParameterCall(
            before='function<｜tool_sep｜><steptml:invoke name="',
            name_end='">',
            key_begin='<steptml:parameter name="',
            key_end=('">',),
            value_end="</steptml:parameter>",
            after="</steptml:invoke>",
            gap="",
        ),
    ),
    begin=("<｜tool_call_begin｜>",),
    end="<｜tool_call_end｜>",
    section=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    section_pad="\n",
    joint="\n",
)
