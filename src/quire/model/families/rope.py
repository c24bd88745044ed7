"""Reads a rope from the spellings configs use: rope_parameters, or rope_theta beside rope_scaling."""

from __future__ import annotations

from typing import Any, get_args

from quire.errors import ModelError
from quire.model.families.config import ConfigReader
from quire.model.spec import RopeKind, RopeSpec

KINDS: tuple[RopeKind, ...] = get_args(RopeKind)
NEUTRAL = {"partial_rotary_factor": (1.0,)}


def read_rope(config: ConfigReader, rotary_dim: int, max_position: int, theta: float) -> RopeSpec:
    """`theta` is the family's default base; `max_position` stands in where no original length is given."""
    reader = ConfigReader(*_parameters(config))
    theta = reader.number("rope_theta", config.number("rope_theta", theta))
    named, older = reader.get("rope_type"), reader.get("type")
    named = named or older or "default"
    if named not in KINDS:
        raise reader.wrong("rope_type", named, f"one of {', '.join(KINDS)}")
    kind = KINDS[KINDS.index(named)]
    if theta <= 1.0:
        raise reader.wrong("rope_theta", theta, "greater than 1")
    spec = RopeSpec(kind, theta, rotary_dim)
    if kind == "linear":
        spec = RopeSpec(kind, theta, rotary_dim, factor=_factor(reader, reader.number("factor")))
    elif kind == "llama3":
        spec = _llama3(reader, spec, max_position)
    elif kind == "yarn":
        spec = _yarn(reader, spec, max_position)
    reader.finish(frozenset(), NEUTRAL)
    return spec


def context_length(rope: RopeSpec, max_position: int) -> int:
    """Positions the model can use: yarn configs may state only the length before extension."""
    extended = int(rope.factor * rope.original_max_position) if rope.kind == "yarn" else 0
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
