"""Llama 3.2 and 4, ToolACE: a list of Python calls."""

from quire.text.formats.shapes import PythonCall, ToolFormat

FORMAT = ToolFormat(
    "pythonic",
    (PythonCall(),),
    begin=("<|python_start|>", "<|python_tag|>"),
    end="<|python_end|>",
    bare=("[",),
    marked=False,
)
