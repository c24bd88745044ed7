"""Formats of tool calls, one file each; the registry lists them."""
