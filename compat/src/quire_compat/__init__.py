"""What the compatible names share: console scripts, and the check for real packages of those names."""
