"""What `--quantization` may name, and what it means for each weight. Knows the layouts' description; knows no model."""

from __future__ import annotations

from quire.devices.protocol import Quantized, Scheme
from quire.errors import ConfigError

GROUPS = (32, 64, 128)


def scheme(name: str, group_size: int = 64, symmetric: bool = True, pure: bool = False) -> Scheme | None:
    """The weights' types by their name; None for "auto", which leaves them as they are.

    Four bits are few for the embedding and the head, which get eight unless `pure`. ConfigError.
    """
    if pure and name not in ("int4", "int4wo"):
        raise ConfigError(
            "--quantization-pure is for --quantization int4 or int4wo; leave it out, or choose one"
        )
    if name == "auto":
        return None
    if group_size not in GROUPS:
        raise ConfigError(f"--quantization-group-size must be 32, 64 or 128, got {group_size}")
    int8_rows = not name.endswith("wo")
    int8 = Quantized(8, int8_rows=int8_rows)
    if name in ("int8", "int8wo"):
        return Scheme(int8, int8)
    if name in ("int4", "int4wo"):
        int4 = Quantized(4, group_size, symmetric, int8_rows)
        return Scheme(int4, int4 if pure else int8)
    raise ConfigError(f"--quantization must be auto, int8, int8wo, int4 or int4wo, got {name!r}")


def weights_name(scheme: Scheme | None, dtype: str) -> str:
    """As a log or a table names it."""
    if scheme is None:
        return dtype
    weights = scheme.linear
    name = f"int{weights.bits}" + ("" if weights.int8_rows else "wo")
    if weights.bits == 4:
        name += f", groups of {weights.group_size}"
        name += "" if weights.symmetric else ", asymmetric"
        name += ", pure" if scheme.table == weights else ""
    return name
