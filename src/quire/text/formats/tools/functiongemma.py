"""FunctionGemma: an unquoted object whose strings have their own quotes."""

from quire.text.formats.shapes import LiteralCall, ToolFormat

FORMAT = ToolFormat(
    "functiongemma", (LiteralCall("<escape>"),), begin=("<start_function_call>",), end="<end_function_call>"
)
