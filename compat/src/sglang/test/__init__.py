"""Helpers of SGLang's documentation."""
