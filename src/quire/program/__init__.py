"""Programs over the engine core: one request that several requests answer. Token ids only."""

from quire.program.core import Core, Program, Run
from quire.program.host import Programs

__all__ = ["Core", "Program", "Programs", "Run"]
