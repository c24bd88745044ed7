"""Functionary v3.2: no reasoning, but answers name their recipient."""

from quire.text.formats.shapes import ReasoningFormat, Recipients

FORMAT = ReasoningFormat("functionary_v32", recipients=Recipients(">>>", "all"))
