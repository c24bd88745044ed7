"""SGLang's options."""

from quire_compat.sglang.flags import ServerArgs

__all__ = ["ServerArgs"]
