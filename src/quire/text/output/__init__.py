"""Model output into content, reasoning and tool calls, and the constraints that force such output."""
