"""DeepSeek V4: DSML as in V3.2, in a section of another name."""

from quire.text.formats.shapes import ParameterCall, ToolFormat, TypeMark

FORMAT = ToolFormat(
    "deepseek_v4",
    (
        ParameterCall(
            name_end='">',
            key_begin='<｜DSML｜parameter name="',
            key_end=('"',),
            types=(
                TypeMark(' string="true">', "string", raw=True),
                TypeMark(' string="false">', raw=False),
                TypeMark(">"),
            ),
            value_end="</｜DSML｜parameter>",
            after="</｜DSML｜invoke>",
        ),
    ),
    begin=('<｜DSML｜invoke name="',),
    section=("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    section_pad="\n",
    joint="\n",
)
