"""Where programs begin."""
