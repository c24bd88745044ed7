"""Calls as a name beside JSON, and calls as messages."""

from quire.text.formats.shapes import Channels, JsonCall, NamedCall, Recipients, ToolFormat

FORMATS = (
    # gpt-oss: calls are messages with a recipient (harmony).
    ToolFormat("openai", (), channels=Channels()),
    # DeepSeek V3 and R1: a name and JSON in a code block, inside a section.
    ToolFormat(
        "deepseek_v3",
        (NamedCall(before="function<｜tool▁sep｜>", between=("```json",), after="```", pad="\n"),),
        begin=("<｜tool▁call▁begin｜>",),
        end="<｜tool▁call▁end｜>",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        joint="\n",
    ),
    # DeepSeek V3.1: a name and JSON, inside a section.
    ToolFormat(
        "deepseek_v31",
        (NamedCall(between=("<｜tool▁sep｜>",)),),
        begin=("<｜tool▁call▁begin｜>",),
        end="<｜tool▁call▁end｜>",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    # Kimi K2: numbered function names and JSON, inside a section.
    ToolFormat(
        "kimi_k2",
        (NamedCall(between=("<|tool_call_argument_begin|>",), prefix="functions.", numbered=True),),
        begin=("<|tool_call_begin|>",),
        end="<|tool_call_end|>",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        call_id="functions.{name}:{index}",
    ),
    # Functionary v3.1: JSON between tags that name the function.
    ToolFormat(
        "functionary_v31", (NamedCall(between=(">",)),), begin=("<function=",), end="</function>", joint="\n"
    ),
    # Functionary v3.2: messages to the user or to functions.
    ToolFormat(
        "functionary_v32", (NamedCall(between=("\n",)),), joint=">>>", recipients=Recipients(">>>", "all")
    ),
    # Mistral from tokenizer v11 on: a name and JSON per marker.
    ToolFormat(
        "mistral_v11",
        (NamedCall(between=("[ARGS]", ""), aside="[CALL_ID]"), JsonCall()),
        begin=("[TOOL_CALLS]",),
        call_id="{hex9}",
    ),
    # Mistral up to tokenizer v7: a JSON list.
    ToolFormat(
        "mistral",
        (JsonCall(listed=True), NamedCall(between=("[ARGS]", ""), aside="[CALL_ID]")),
        begin=("[TOOL_CALLS]",),
        call_id="{hex9}",
    ),
)
