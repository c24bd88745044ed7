"""SGLang's names for Quire: its language, its engine, and its server in a child process."""

from quire.program import language
from quire.program.language import *  # noqa: F403 - the language has the same names
from quire_compat.sglang import runtime
from quire_compat.sglang.engine import Engine
from sglang.version import __version__

Runtime = runtime.Runtime  # with SGLang's options, in place of the language's own

__all__ = [*language.__all__, "Engine", "__version__"]
