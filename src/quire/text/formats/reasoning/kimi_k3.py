"""Kimi K3: paired markers around reasoning, response and message."""

from quire.text.formats.shapes import ReasoningFormat

FORMAT = ReasoningFormat(
    "kimi_k3",
    ("<|open|>think<|sep|>",),
    ("<|close|>think<|sep|>",),
    answer_begin=("<|open|>response<|sep|>",),
    answer_end=("<|close|>response<|sep|>", "<|close|>message<|sep|>"),
)
