"""Formats of tool calls and reasoning, as data: one small file per format, listed in the registry."""
