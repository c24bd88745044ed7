"""`python -m vllm.benchmarks.serve ...`: the same as `vllm bench serve ...`."""

import sys

from vllm.entrypoints.cli.main import main

if __name__ == "__main__":
    main(["bench", "serve", *sys.argv[1:]])
