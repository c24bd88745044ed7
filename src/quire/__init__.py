"""Quire serves large language models."""
