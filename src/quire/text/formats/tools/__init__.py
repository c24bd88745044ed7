"""Formats of tool calls, by the syntax of a call; the registry lists them."""
