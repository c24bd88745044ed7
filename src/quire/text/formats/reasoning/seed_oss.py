"""Seed-OSS: its own think tags."""

from quire.text.formats.shapes import ReasoningFormat

FORMAT = ReasoningFormat("seed_oss", ("<seed:think>",), ("</seed:think>",))
