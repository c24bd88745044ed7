"""DeepSeek R1: reasoning from the start up to a tag."""

from quire.text.formats.shapes import ReasoningFormat

FORMAT = ReasoningFormat("deepseek_r1", ("<think>",), ("</think>",), opened=True)
