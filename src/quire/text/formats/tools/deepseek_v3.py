"""DeepSeek V3 and R1: a name and JSON in a code block, inside a section."""

from quire.text.formats.shapes import NamedCall, ToolFormat

FORMAT = ToolFormat(
    "deepseek_v3",
    (NamedCall(before="function<｜tool▁sep｜>", between=("```json",), after="```", pad="\n"),),
    begin=("<｜tool▁call▁begin｜>",),
    end="<｜tool▁call▁end｜>",
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    joint="\n",
)
