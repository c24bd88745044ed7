"""`python -m vllm.benchmarks.latency ...`: the same as `vllm bench latency ...`."""

import sys

from vllm.entrypoints.cli.main import main

if __name__ == "__main__":
    main(["bench", "latency", *sys.argv[1:]])
