"""Programs over the engine core: requests that are answered by several others. Token ids only."""

from quire.program.core import Core, Program, Run
from quire.program.host import Programs

__all__ = ["Core", "Program", "Programs", "Run"]
