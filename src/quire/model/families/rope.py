"""Reads a rope from the spellings configs use: rope_parameters, or rope_theta beside rope_scaling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from quire.errors import ModelError
from quire.model.families.config import ConfigReader
from quire.model.spec import RopeKind, RopeSpec

KINDS: tuple[RopeKind, ...] = get_args(RopeKind)
ALIASES = {"su": "longrope", "mrope": "default"}
# Read by `rotary_dim`, or what other keys say too.
HARMLESS = frozenset({"partial_rotary_factor"})


def rotary_dim(
    config: ConfigReader, head_dim: int, factor: float = 1.0, key: str = "partial_rotary_factor"
) -> int:
    """Elements of a head that are rotated; `factor` is the family's default, `key` its older name for it."""
    older = config.optional_number(key)
    parameters = config.get("rope_parameters") or config.get("rope_scaling")
    named = parameters.get("partial_rotary_factor") if isinstance(parameters, dict) else None
    for value in (older, named):
        factor = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else factor
    size = int(head_dim * factor)
    if not 2 <= size <= head_dim or size % 2:
        raise config.wrong(key, factor, f"such that an even part of head_dim ({head_dim}) is rotated")
    return size


def read_rope(config: ConfigReader, rotary_dim: int, max_position: int, theta: float) -> RopeSpec:
    """`theta` is the family's default base; `max_position` stands in where no original length is given."""
    return parse_rope(
        config, *_parameters(config), rotary_dim, max_position, config.number("rope_theta", theta)
    )


def read_layer_ropes(
    config: ConfigReader,
    rotary_dim: int,
    max_position: int,
    kinds: Sequence[str],
    thetas: Mapping[str, float],
) -> tuple[RopeSpec, ...]:
    """A rope for each layer by its kind in `kinds`: rope_parameters has an object for each, or the older spelling has
    one in all (rope_scaling is then for full attention alone). `thetas` are bases by kind where none is given there.
    """
    values, where = _parameters(config)
    if any(kind in values for kind in thetas):
        by_kind = {kind: values.get(kind) or {} for kind in thetas}
        unknown = sorted(set(values) - set(thetas))
        if unknown:
            raise ModelError(f"{where}: {unknown[0]} is not understood")
    else:
        by_kind = {kind: values if kind == "full_attention" else {} for kind in thetas}
    ropes = {}
    for kind, theta in thetas.items():
        if not isinstance(by_kind[kind], dict):
            raise ModelError(f"{where}: {kind} must be an object")
        ropes[kind] = parse_rope(config, by_kind[kind], f"{where}: {kind}", rotary_dim, max_position, theta)
    return tuple(ropes[kind] for kind in kinds)


def parse_rope(
    config: ConfigReader, values: dict[str, Any], where: str, rotary_dim: int, max_position: int, theta: float
) -> RopeSpec:
    """One rope object."""
    reader = ConfigReader(values, where)
    theta = reader.number("rope_theta", theta)
    named, older = reader.get("rope_type"), reader.get("type")
    named = named or older or "default"
    named = ALIASES.get(named, named) if isinstance(named, str) else named
    if named not in KINDS:
        raise reader.wrong("rope_type", named, f"one of {', '.join(KINDS)}")
    kind = KINDS[KINDS.index(named)]
    if theta <= 1.0:
        raise reader.wrong("rope_theta", theta, "greater than 1")
    spec = RopeSpec(kind, theta, rotary_dim)
    if kind == "linear":
        spec = RopeSpec(kind, theta, rotary_dim, factor=_factor(reader, reader.number("factor")))
    elif kind == "dynamic":
        reader.number("factor", 1.0)
    elif kind == "longrope":
        spec = _longrope(config, reader, spec, max_position)
    elif kind == "llama3":
        spec = _llama3(reader, spec, max_position)
    elif kind == "yarn":
        spec = _yarn(reader, spec, max_position)
    reader.finish(HARMLESS, {})
    return spec


def context_length(rope: RopeSpec | None, max_position: int) -> int:
    """Positions the model can use: yarn configs may state only the length before extension."""
    extended = (
        int(rope.factor * rope.original_max_position) if rope is not None and rope.kind == "yarn" else 0
    )
    return max(max_position, extended)


def _parameters(config: ConfigReader) -> tuple[dict[str, Any], str]:
    """The rope's own object and its name."""
    newer, older = config.get("rope_parameters"), config.get("rope_scaling")
    if newer and older and newer != older:
        raise ModelError(f"{config.where}: rope_parameters and rope_scaling differ; keep one of them")
    name, value = ("rope_scaling", older) if older else ("rope_parameters", newer)
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise config.wrong(name, value, "an object")
    return value, f"{config.where}: {name}"


def _factor(reader: ConfigReader, value: float) -> float:
    if value <= 0:
        raise reader.wrong("factor", value, "greater than 0")
    return value


def _longrope(config: ConfigReader, reader: ConfigReader, spec: RopeSpec, max_position: int) -> RopeSpec:
    """The long factors where the model reaches beyond the length it was first trained for, else the short ones."""
    original = config.get("original_max_position_embeddings")
    original = reader.get("original_max_position_embeddings") or original or max_position
    if isinstance(original, bool) or not isinstance(original, int) or original < 2:
        raise reader.wrong("original_max_position_embeddings", original, "an integer above 1")
    factors = {}
    for key in ("short_factor", "long_factor"):
        values = reader.get(key)
        if (
            not isinstance(values, list)
            or len(values) != spec.rotary_dim // 2
            or not all(isinstance(v, (int, float)) and v > 0 for v in values)
        ):
            raise reader.wrong(key, values, f"{spec.rotary_dim // 2} numbers above 0")
        factors[key] = tuple(float(v) for v in values)
    return RopeSpec(
        "longrope",
        spec.theta,
        spec.rotary_dim,
        factor=_factor(reader, reader.number("factor", max_position / original)),
        original_max_position=original,
        attention_factor=reader.optional_number("attention_factor"),
        factors=factors["long_factor" if max_position > original else "short_factor"],
    )


def _llama3(reader: ConfigReader, spec: RopeSpec, max_position: int) -> RopeSpec:
    low, high = reader.number("low_freq_factor"), reader.number("high_freq_factor")
    if high <= low:
        raise ModelError(f"{reader.where}: high_freq_factor must be greater than low_freq_factor")
    return RopeSpec(
        "llama3",
        spec.theta,
        spec.rotary_dim,
        factor=_factor(reader, reader.number("factor")),
        original_max_position=reader.integer("original_max_position_embeddings", max_position),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(reader: ConfigReader, spec: RopeSpec, max_position: int) -> RopeSpec:
    original = reader.integer("original_max_position_embeddings", max_position)
    return RopeSpec(
        "yarn",
        spec.theta,
        spec.rotary_dim,
        factor=_factor(reader, reader.number("factor", max_position / original)),
        original_max_position=original,
        beta_fast=reader.optional_number("beta_fast") or 32.0,
        beta_slow=reader.optional_number("beta_slow") or 1.0,
        attention_factor=reader.optional_number("attention_factor"),
        mscale=reader.optional_number("mscale"),
        mscale_all_dim=reader.optional_number("mscale_all_dim"),
        truncate=reader.boolean("truncate", True),
    )
