"""What `--quantization` may name, and what it means for each weight. Knows the layouts' description; knows no model."""

from __future__ import annotations

from quire.errors import ConfigError
from quire.ops.protocol import Quantized

GROUPS = (32, 64, 128)


def scheme(name: str, group_size: int = 64, symmetric: bool = True) -> Quantized | None:
    """The weights' type by its name; None for "auto", which leaves them as they are. ConfigError."""
    if name == "auto":
        return None
    if group_size not in GROUPS:
        raise ConfigError(f"--quantization-group-size must be 32, 64 or 128, got {group_size}")
    int8_rows = not name.endswith("wo")
    if name in ("int8", "int8wo"):
        return Quantized(8, int8_rows=int8_rows)
    if name in ("int4", "int4wo"):
        return Quantized(4, group_size, symmetric, int8_rows)
    raise ConfigError(f"--quantization must be auto, int8, int8wo, int4 or int4wo, got {name!r}")


def weights_name(weights: Quantized | None, dtype: str) -> str:
    """As a log or a table names it."""
    if weights is None:
        return dtype
    name = f"int{weights.bits}" + ("" if weights.int8_rows else "wo")
    if weights.bits == 8:
        return name
    return f"{name}, groups of {weights.group_size}{'' if weights.symmetric else ', asymmetric'}"
