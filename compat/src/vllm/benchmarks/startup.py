"""`python -m vllm.benchmarks.startup ...`: the same as `vllm bench startup ...`."""

import sys

from vllm.entrypoints.cli.main import main

if __name__ == "__main__":
    main(["bench", "startup", *sys.argv[1:]])
