"""Calls as JSON objects, Python calls or unquoted objects."""

from quire.text.formats.shapes import JsonCall, KeyedCall, LiteralCall, PythonCall, ToolFormat

FORMATS = (
    # Phi-4-mini: a JSON list.
    ToolFormat(
        "phi4_mini", (JsonCall(listed=True),), begin=("functools", "<|tool_call|>"), end="<|/tool_call|>"
    ),
    # Gemma 4: an unquoted object whose strings have their own quotes.
    ToolFormat("gemma4", (LiteralCall('<|"|>'),), begin=("<|tool_call>",), end="<tool_call|>"),
    # FunctionGemma: an unquoted object whose strings have their own quotes.
    ToolFormat(
        "functiongemma",
        (LiteralCall("<escape>"),),
        begin=("<start_function_call>",),
        end="<end_function_call>",
    ),
    # Granite 3: a JSON list.
    ToolFormat("granite", (JsonCall(listed=True),), begin=("<|tool_call|>", "<tool_call>"), bare=("[",)),
    # Granite 20B function calling: a JSON object per marker.
    ToolFormat("granite_20b_fc", (JsonCall(),), begin=("<function_call>",), joint=" ", pad=" "),
    # Jamba, Hunyuan A13B, Apriel: a JSON list between tags.
    ToolFormat("jamba", (JsonCall(listed=True),), begin=("<tool_calls>",), end="</tool_calls>"),
    # Nemotron Nano and Super: a JSON list between tags.
    ToolFormat("nemotron", (JsonCall(listed=True),), begin=("<TOOLCALL>",), end="</TOOLCALL>"),
    # InternLM 2.5 and 3: a JSON object between markers.
    ToolFormat(
        "internlm",
        (JsonCall(key="parameters"),),
        begin=("<|action_start|><|plugin|>",),
        end="<|action_end|>",
        pad="\n",
    ),
    # LFM2 and LFM2.5: Python calls between markers, or JSON on request.
    ToolFormat(
        "lfm2", (PythonCall(), JsonCall(listed=True)), begin=("<|tool_call_start|>",), end="<|tool_call_end|>"
    ),
    # Command R7B and Command A: a JSON list between markers.
    ToolFormat(
        "cohere_command3",
        (JsonCall(key="parameters", name_key="tool_name", id_key="tool_call_id", listed=True),),
        begin=("<|START_ACTION|>",),
        end="<|END_ACTION|>",
    ),
    # Command R and R+: a JSON list in a code block.
    ToolFormat(
        "cohere_command_r",
        (JsonCall(key="parameters", name_key="tool_name", listed=True),),
        begin=("Action: ```json\n", "Action:```json\n", "Action:\n```json\n"),
        end="```",
    ),
    # Apertus: a list of objects keyed by the function's name.
    ToolFormat("apertus", (KeyedCall(),), begin=("<|tools_prefix|>",), end="<|tools_suffix|>"),
    # GigaChat 3: a message of the role `function call`.
    ToolFormat(
        "gigachat3",
        (JsonCall(),),
        begin=(
            "function call<|role_sep|>\n",
            "<|message_sep|>\n\nfunction call<|role_sep|>\n",
            "<|function_call|>",
        ),
        end="<|message_sep|>",
    ),
    # Olmo 3: one Python call per line, between tags.
    ToolFormat(
        "olmo3",
        (PythonCall(bracketed=False),),
        begin=("<function_calls>",),
        end="</function_calls>",
        pad="\n",
        joint="\n",
    ),
    # ERNIE 4.5: a JSON object between tags.
    ToolFormat("ernie45", (JsonCall(),), begin=("<tool_call>",), end="</tool_call>", pad="\n", joint="\n"),
    # xLAM: a JSON list without a marker.
    ToolFormat(
        "xlam",
        (JsonCall(listed=True),),
        begin=("<tool_call>", "[TOOL_CALLS]"),
        end="</tool_call>",
        bare=("[",),
        marked=False,
    ),
    # Llama 3.2 and 4, ToolACE: a list of Python calls.
    ToolFormat(
        "pythonic",
        (PythonCall(),),
        begin=("<|python_start|>", "<|python_tag|>"),
        end="<|python_end|>",
        bare=("[",),
        marked=False,
    ),
    # Llama 3.1 to 4: a JSON object without a marker.
    ToolFormat(
        "llama3_json",
        (JsonCall(key="parameters"),),
        begin=("<|python_tag|>",),
        bare=("{", "["),
        marked=False,
        separators=";,",
        joint="; ",
    ),
)
