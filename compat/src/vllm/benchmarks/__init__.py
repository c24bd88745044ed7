"""Benchmarks: `python -m vllm.benchmarks.serve ...` is `vllm bench serve ...`."""
