"""`python -m sglang.launch_server --model-path M ...`: a server with SGLang's flags and native endpoints."""

from quire_compat.sglang.launch_server import main

if __name__ == "__main__":
    main(prog="python -m sglang.launch_server")
