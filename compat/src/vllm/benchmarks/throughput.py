"""`python -m vllm.benchmarks.throughput ...`: the same as `vllm bench throughput ...`."""

import sys

from vllm.entrypoints.cli.main import main

if __name__ == "__main__":
    main(["bench", "throughput", *sys.argv[1:]])
