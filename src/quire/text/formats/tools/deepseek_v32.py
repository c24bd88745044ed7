"""DeepSeek V3.2: DSML tags whose parameters say whether they are strings."""

from quire.text.formats.shapes import ParameterCall, ToolFormat, TypeMark

FORMAT = ToolFormat(
    "deepseek_v32",
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
    section=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    section_pad="\n",
    joint="\n",
)
