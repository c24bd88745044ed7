"""Qwen3 and most others: think tags, if the output or the prompt opens them."""

from quire.text.formats.shapes import ReasoningFormat

FORMAT = ReasoningFormat("qwen3", ("<think>",), ("</think>",))
