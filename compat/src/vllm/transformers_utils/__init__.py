"""Older names of what is about tokenizers."""
