"""Where programs that were written for SGLang begin."""
