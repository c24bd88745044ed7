"""The `vllm` command: Quire's commands with vLLM's names and defaults."""

import os
import sys

import quire.cli
from vllm.engine.arg_utils import DEFAULTS

_COMMANDS = ("serve", "chat", "complete", "bench latency", "bench serve", "bench startup", "bench throughput")
# Flags that have another name in Quire.
_FLAGS = {"--system-prompt": "--system", "--model-name": "--model"}
# Like vLLM's, the server listens on all interfaces, and the clients talk to a server on this machine.
_URL = {"url": "http://localhost:8000/v1"}
# The only way in which vLLM takes this option.
_ALLOWED = os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").lower() in ("1", "true")
_RUNTIME_LORA = {"allow_runtime_lora": True} if _ALLOWED else {}
PROGRAM = quire.cli.Program(
    "vllm",
    {name: quire.cli.COMMANDS[name] for name in _COMMANDS},
    {
        "serve": {"host": "0.0.0.0", "metrics_prefix": "vllm", **_RUNTIME_LORA, **DEFAULTS},
        "chat": _URL,
        "complete": _URL,
        "bench latency": DEFAULTS,
        "bench startup": DEFAULTS,
        "bench throughput": DEFAULTS,
    },
)


def main(argv: list[str] | None = None) -> None:
    """Run a command. `argv` are its words; the default is the command line's."""
    words = (word.partition("=") for word in (sys.argv[1:] if argv is None else argv))
    quire.cli.main(["".join((_FLAGS.get(flag, flag), *value)) for flag, *value in words], PROGRAM)


if __name__ == "__main__":
    main()
