"""Turns model output into content, reasoning and tool calls, and makes the constraints that force such output."""
