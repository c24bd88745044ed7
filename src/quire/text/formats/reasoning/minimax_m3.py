"""MiniMax M3: its own think tags."""

from quire.text.formats.shapes import ReasoningFormat

FORMAT = ReasoningFormat("minimax_m3", ("<mm:think>",), ("</mm:think>",))
