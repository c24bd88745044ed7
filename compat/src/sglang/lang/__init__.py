"""The language."""
