"""DeepSeek V3.1: a name and JSON, inside a section."""

from quire.text.formats.shapes import NamedCall, ToolFormat

FORMAT = ToolFormat(
    "deepseek_v31",
    (NamedCall(between=("<｜tool▁sep｜>",)),),
    begin=("<｜tool▁call▁begin｜>",),
    end="<｜tool▁call▁end｜>",
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
