"""How a request makes a vector."""

from quire import PoolingParams

__all__ = ["PoolingParams"]
