"""Chat templates: check messages and render them in a sandbox."""
