"""Magistral and Ministral: reasoning tokens anywhere in the output."""

from quire.text.formats.shapes import ReasoningFormat

FORMAT = ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",), anywhere=True)
