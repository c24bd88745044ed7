"""SGLang's names for Quire."""

from quire.program import function, gen, select, set_default_backend

__all__ = ["function", "gen", "select", "set_default_backend"]
