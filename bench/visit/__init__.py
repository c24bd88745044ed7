"""The stages of bench/gpu.py, and the problems that they solve."""
