"""Hunyuan A13B: think tags, and the answer between tags."""

from quire.text.formats.shapes import ReasoningFormat

FORMAT = ReasoningFormat(
    "hunyuan_a13b", ("<think>",), ("</think>",), answer_begin=("<answer>",), answer_end=("</answer>",)
)
