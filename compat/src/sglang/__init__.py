"""SGLang's names for Quire: its language, its engine, and its server in a child process."""

from quire.entrypoints.sglang.runtime import Runtime
from quire.llm.sglang_engine import Engine
from quire.program import language
from quire.program.language import *  # noqa: F403 - the language has the same names
from sglang.version import __version__

__all__ = [*language.__all__, "Engine", "Runtime", "__version__"]
