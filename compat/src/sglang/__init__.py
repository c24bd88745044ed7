"""SGLang's names for Quire: its language, its engine, and its server in a child process."""

from quire.entrypoints.sglang import runtime
from quire.llm.sglang_engine import Engine
from quire.program import language
from quire.program.language import *  # noqa: F403 - the language has the same names
from sglang.version import __version__

Runtime = runtime.Runtime  # with SGLang's options, in place of the language's own

__all__ = [*language.__all__, "Engine", "__version__"]
