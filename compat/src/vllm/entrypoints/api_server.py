"""`python -m vllm.entrypoints.api_server --model M ...`: a server whose /generate takes sampling parameters."""

import sys

from vllm.entrypoints.cli.main import main

if __name__ == "__main__":
    main(["serve", "--vllm-demo-api", *sys.argv[1:]])
