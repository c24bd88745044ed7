"""Kimi k1.5, Kimi-VL Thinking and Kimi-Dev: tags of their own."""

from quire.text.formats.shapes import ReasoningFormat

FORMAT = ReasoningFormat("kimi", ("◁think▷",), ("◁/think▷",))
