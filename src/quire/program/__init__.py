"""Programs over the engine core, and the language that they are written in: `from quire.program import function, gen`.

Here are requests that are answered by several others: beam search, select, and programs of steps. The language
(`language/`) makes such steps of Python code; it is loaded when one of its names is first used.
"""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    language = importlib.import_module("quire.program.language")
    if name in language.__all__:
        return getattr(language, name)
    raise AttributeError(f"module 'quire.program' has no attribute {name!r}")
