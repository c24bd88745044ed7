"""Chat templates: checking messages and rendering them in a sandbox."""
