"""vLLM's flags: those that are fields here, and those that are accepted or refused."""
