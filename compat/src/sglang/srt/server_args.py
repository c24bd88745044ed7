"""SGLang's options."""

from quire.flags.sglang import ServerArgs

__all__ = ["ServerArgs"]
