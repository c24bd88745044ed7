"""Console scripts. Each first makes sure that its name is not a real package's."""

from __future__ import annotations

import importlib
import sys

from quire_compat.real import installed, message


def run(package: str, module: str) -> None:
    """Run `main` of a module, unless the real `package` is installed too."""
    if found := installed((package,)):
        sys.exit(message(found))
    importlib.import_module(module).main()


def vllm() -> None:
    run("vllm", "vllm.entrypoints.cli.main")


def sglang() -> None:
    run("sglang", "sglang.cli")


def trtllm_build() -> None:
    run("tensorrt-llm", "tensorrt_llm.commands.build")


def trtllm_serve() -> None:
    run("tensorrt-llm", "tensorrt_llm.commands.serve")


def trtllm_bench() -> None:
    run("tensorrt-llm", "tensorrt_llm.commands.bench")


def convert_checkpoint() -> None:
    run("tensorrt-llm", "tensorrt_llm.commands.convert")


def quantize() -> None:
    run("tensorrt-llm", "tensorrt_llm.commands.quantize")
