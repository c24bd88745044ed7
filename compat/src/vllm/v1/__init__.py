"""Names of vLLM's current engine."""
