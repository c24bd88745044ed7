"""`sglang serve --model-path M ...`: the same as `python -m sglang.launch_server`."""

import sys

from quire_compat.sglang import launch_server


def main() -> None:
    """Run the command."""
    if sys.argv[1:2] != ["serve"]:
        sys.exit("usage: sglang serve --model-path MODEL [options]")
    launch_server.main(sys.argv[2:], prog="sglang serve")
