"""MiniMax M2 for clients that send reasoning back: it stays in the content, between its tags."""

from quire.text.formats.shapes import ReasoningFormat

FORMAT = ReasoningFormat("minimax_m2_append_think", ("<think>",), ("</think>",), opened=True, in_content=True)
