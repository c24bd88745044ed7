"""Calls as tags around each argument."""

from dataclasses import replace
from typing import Any

from quire.text.formats.shapes import JsonCall, NestedCall, ParameterCall, ToolFormat, TypeMark


def _invoked(prefix: str = "", tag: str = "parameter", call: str = "invoke", **more: Any) -> ParameterCall:
    """`<parameter name="KEY">VALUE</parameter>`, and `</invoke>` after the last."""
    return ParameterCall(
        **{"name_end": '">', "key_end": ('">',), **more},
        key_begin=f'<{prefix}{tag} name="',
        value_end=f"</{prefix}{tag}>",
        after=f"</{prefix}{call}>",
    )


def _paired(prefix: str = "", **more: Any) -> ParameterCall:
    """`<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>`."""
    return ParameterCall(
        key_begin=f"<{prefix}arg_key>",
        key_end=(f"</{prefix}arg_key>", f"<{prefix}arg_value>"),
        value_end=f"</{prefix}arg_value>",
        **more,
    )


LINES: dict[str, Any] = {"section_pad": "\n", "joint": "\n"}
ASSIGNED = ParameterCall("<parameter=", (">",), "</parameter>", "<function=", ">", after="</function>")
DSML = (
    TypeMark(' string="true">', "string", raw=True),
    TypeMark(' string="false">', raw=False),
    TypeMark(">"),
)
V32 = ToolFormat(
    "deepseek_v32",
    (_invoked("｜DSML｜", key_end=('"',), types=DSML),),
    begin=('<｜DSML｜invoke name="',),
    section=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    **LINES,
)
FORMATS = (
    # DeepSeek V3.2: DSML tags whose parameters say whether they are strings.
    V32,
    # DeepSeek V4: DSML as in V3.2, in a section of another name.
    replace(V32, name="deepseek_v4", section=("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")),
    # Kimi K3: typed arguments between paired markers.
    ToolFormat(
        "kimi_k3",
        (
            ParameterCall(
                name_end='" index="',
                number_end='"<|sep|>',
                key_begin='<|open|>argument key="',
                key_end=('"',),
                types=(
                    TypeMark(' type="string"<|sep|>', "string", raw=True),
                    TypeMark(' type="number"<|sep|>', "number", raw=False),
                    TypeMark(' type="number"<|sep|>', "integer", raw=False),
                    TypeMark(' type="boolean"<|sep|>', "boolean", raw=False),
                    TypeMark(' type="null"<|sep|>', "null", raw=False),
                    TypeMark(' type="array"<|sep|>', "array", raw=False),
                    TypeMark(' type="object"<|sep|>', raw=False),
                ),
                value_end="<|close|>argument<|sep|>",
                after="<|close|>call<|sep|>",
                gap="",
            ),
        ),
        begin=('<|open|>call tool="',),
        section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    ),
    # Step3: parameters between tags, inside a section.
    ToolFormat(
        "step3",
        (_invoked("steptml:", before='function<｜tool_sep｜><steptml:invoke name="', gap=""),),
        begin=("<｜tool_call_begin｜>",),
        end="<｜tool_call_end｜>",
        section=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        **LINES,
    ),
    # Seed-OSS: function and parameter tags.
    ToolFormat(
        "seed_oss", (ASSIGNED,), begin=("<seed:tool_call>",), end="</seed:tool_call>", pad="\n", joint="\n"
    ),
    # Qwen3-Coder, Qwen3.5, Step-3.5, Nemotron 3: function and parameter tags.
    ToolFormat(
        "qwen3_coder",
        (replace(ASSIGNED, pad="\n"),),
        begin=("<tool_call>",),
        end="</tool_call>",
        bare=("<function=",),
        pad="\n",
        joint="\n",
    ),
    # MiniCPM5: parameters between tags, plain or as CDATA.
    ToolFormat(
        "minicpm5",
        (_invoked(tag="param", call="function", gap="", cdata=True),),
        begin=('<function name="',),
        joint="\n",
    ),
    # MiniMax M3: arguments as nested tags, each behind a marker.
    ToolFormat(
        "minimax_m3",
        (NestedCall(prefix="]<]minimax[>[", name_end='">', after="]<]minimax[>[</invoke>"),),
        begin=(']<]minimax[>[<invoke name="',),
        section=("]<]minimax[>[<tool_call>", "]<]minimax[>[</tool_call>"),
        section_pad="\n",
        joint="\n",
    ),
    # MiniMax M2: parameters between tags, inside a section.
    ToolFormat(
        "minimax_m2",
        (_invoked(),),
        begin=('<invoke name="',),
        section=("<minimax:tool_call>", "</minimax:tool_call>"),
        **LINES,
    ),
    # dots3: parameters between tags, inside a section.
    ToolFormat(
        "dots",
        (_invoked(pad="\n"),),
        begin=('<invoke name="',),
        section=("<dots_function_call>", "</dots_function_call>"),
        **LINES,
    ),
    # K2 Horizon: keys and values between tags, inside a section; types and JSON where the template asks for them.
    ToolFormat(
        "k2_horizon",
        (_paired("ifm|", type_tags=("<ifm|arg_type>", "</ifm|arg_type>")), JsonCall()),
        begin=("<ifm|tool_call>",),
        end="</ifm|tool_call>",
        section=("<ifm|tool_calls>", "</ifm|tool_calls>"),
        **LINES,
    ),
    # Hy3: keys and values between tags, inside a section.
    ToolFormat(
        "hy_v3",
        (_paired(name_end="<tool_sep>"),),
        begin=("<tool_call>",),
        end="</tool_call>",
        section=("<tool_calls>", "</tool_calls>"),
        **LINES,
    ),
    # GLM-4.5 and later, Laguna: keys and values between tags.
    ToolFormat("glm45", (_paired(),), begin=("<tool_call>",), end="</tool_call>", joint="\n"),
    # LongCat-Flash: a JSON object between tags; newer models write keys and values.
    ToolFormat(
        "longcat",
        (JsonCall(), _paired("longcat_")),
        begin=("<longcat_tool_call>",),
        end="</longcat_tool_call>",
        pad="\n",
        joint="\n",
    ),
)
