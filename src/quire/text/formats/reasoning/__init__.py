"""Formats of reasoning, one file each; the registry lists them."""
