"""`python -m vllm.entrypoints.openai.api_server --model M ...`: the same as `vllm serve M ...`."""

import sys

from vllm.entrypoints.cli.main import main

if __name__ == "__main__":
    main(["serve", *sys.argv[1:]])
