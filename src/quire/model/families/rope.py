"""Read a rope from the spellings configs use: rope_parameters, or rope_theta beside rope_scaling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from msgspec.structs import replace

from quire.errors import ModelError
from quire.model.families.config import ConfigReader
from quire.model.parts.rope import RopeKind, RopeSpec

KINDS: tuple[RopeKind, ...] = get_args(RopeKind)
ALIASES = {"su": "longrope", "mrope": "default", "deepseek_yarn": "yarn"}
MAX_FACTOR = 1e6
PARTIAL = "partial_rotary_factor"


def rotary_dim(config: ConfigReader, head_dim: int, factor: float = 1.0) -> int:
    """Read how many elements of a head are rotated; `factor` is the default share."""
    inner = _rope_object(config)
    given = config.optional_number(PARTIAL)
    named = inner.optional_number(PARTIAL) if inner is not None and not _by_layer_kind(inner) else None
    if named is not None and config.given(PARTIAL) is not None and given != named:
        raise ModelError(f"{config.where}: {config.given(PARTIAL)} and {PARTIAL} of the rope differ")
    share = named if named is not None else given if given is not None else factor
    size = int(head_dim * min(share, 2))
    if not 2 <= size <= head_dim or size % 2:
        raise config.wrong(PARTIAL, share, f"such that an even part of head_dim ({head_dim}) is rotated")
    return size


def read_rope(config: ConfigReader, rotary_dim: int, max_position: int) -> RopeSpec:
    """Read the rope of all layers. `max_position` stands in for an absent original length."""
    inner = _rope_object(config) or ConfigReader({}, f"{config.where}: rope_parameters")
    return parse_rope(config, inner, rotary_dim, max_position)


def read_layer_ropes(
    config: ConfigReader,
    rotary_dim: int | Mapping[str, int],
    kinds: Sequence[str],
    sliding: str = "rope_theta",
    full: str = "rope_theta",
) -> dict[str, Any]:
    """Read the rope of full attention, and that of each layer by its kind in `kinds`, as fields of read_decoder.

    rope_parameters has an object for each kind, or rope_scaling is one object, which is then for full attention alone.
    `sliding` and `full` name the config's keys of a kind's base, for objects that have none.
    """
    thetas = {"full_attention": full, "sliding_attention": sliding}
    found, max_position = _rope_object(config), config.integer("max_position_embeddings")
    by_kind: dict[str, ConfigReader | None] = dict.fromkeys(thetas)
    if found is not None and any(found.given(kind) for kind in thetas):
        by_kind = {kind: found.section(kind) for kind in thetas}
    else:
        _check_older(config, found, thetas)
        by_kind["full_attention"] = found
    ropes = {}
    for kind, theta in thetas.items():
        inner = by_kind[kind] or ConfigReader({}, f"{config.where}: rope_parameters: {kind}")
        size = rotary_dim if isinstance(rotary_dim, int) else rotary_dim[kind]
        if size == rotary_dim and "proportional" not in (inner.get("rope_type"), inner.get("type")):
            inner.expect(PARTIAL, 1.0, None)
        ropes[kind] = parse_rope(config, inner, size, max_position, theta)
        if not ropes[kind].truncate:  # transformers overlooks it in a rope of some layers
            raise inner.wrong("truncate", False, "true in the rope of one kind of layers")
    return {"rope": ropes["full_attention"], "layer_ropes": [ropes[kind] for kind in kinds]}


def _check_older(config: ConfigReader, found: ConfigReader | None, kinds: Iterable[str]) -> None:
    """Refuse one object for all kinds under the newer name: transformers overlooks what it says."""
    older = config.section("rope_scaling")
    if found is None or (older is not None and older.values()):
        return
    said = {k: v for k, v in found.values().items() if v is not None and (k, v) != ("rope_type", "default")}
    if said:
        raise ModelError(
            f"{found.where}: {', '.join(said)} must be in an object for each of {', '.join(kinds)}, or in rope_scaling"
        )


def expect_newer_name(config: ConfigReader) -> None:
    """Refuse a rope_scaling that names its kind by `type` alone: some classes of transformers overlook that."""
    older = config.section("rope_scaling")
    if older is not None and older.given("rope_type") is None:
        older.expect("type", "default")


def kind_dims(config: ConfigReader, head_dim: int, shares: Mapping[str, float]) -> dict[str, int]:
    """Read the rotated elements of a head by kind of layer; `shares` are the defaults of rope objects without one."""
    found = _rope_object(config)
    dims = {}
    for kind, default in shares.items():
        inner = found.section(kind) if found is not None and found.given(kind) else None
        share = None if inner is None else inner.optional_number(PARTIAL)
        size = int(head_dim * (default if share is None else share))
        if not 2 <= size + size % 2 <= head_dim:
            raise config.wrong(PARTIAL, share, f"such that a part of head_dim ({head_dim}) is rotated")
        dims[kind] = size
    return dims


def parse_rope(
    config: ConfigReader,
    inner: ConfigReader,
    rotary_dim: int,
    max_position: int,
    theta_key: str = "rope_theta",
) -> RopeSpec:
    """Read one rope object. `theta_key` is the config's own key for its base."""
    theta, outer = inner.optional_number("rope_theta"), config.number(theta_key, 10000.0)
    if theta is not None and config.given(theta_key) is not None and theta != outer:
        raise ModelError(f"{inner.where}: rope_theta is {theta}, and {config.given(theta_key)} is {outer}")
    theta = outer if theta is None else theta
    inner.get(PARTIAL)  # read by rotary_dim, or said by other keys
    named, older = inner.get("rope_type"), inner.get("type")
    if named is not None and older is not None and named != older:
        raise ModelError(f"{inner.where}: rope_type and type differ; keep one of them")
    named = named or older or "default"
    named = ALIASES.get(named, named) if isinstance(named, str) else named
    if named not in KINDS:
        raise inner.wrong("rope_type", named, f"one of {', '.join(KINDS)}")
    kind = KINDS[KINDS.index(named)]
    if theta <= 1.0:
        raise inner.wrong("rope_theta", theta, "greater than 1")
    spec = RopeSpec(kind, theta, rotary_dim)
    if rotary_dim % 2:
        if kind != "default":
            raise inner.wrong(
                PARTIAL, inner.get(PARTIAL), f"such that an even part of a head is rotated by {kind}"
            )
        spec = replace(spec, rotary_dim=rotary_dim + 1, share=rotary_dim)
    if kind == "linear":
        spec = replace(spec, factor=_factor(inner, inner.number("factor")))
    elif kind == "dynamic":
        inner.number("factor", 1.0)
    elif kind == "longrope":
        spec = _longrope(config, inner, spec, max_position)
    elif kind == "llama3":
        spec = _llama3(config, inner, spec, max_position)
    elif kind == "yarn":
        spec = _yarn(config, inner, spec, max_position)
    elif kind == "proportional":
        share = inner.number(PARTIAL, 1.0)
        if share > 1:
            raise inner.wrong(PARTIAL, share, "at most 1")
        factor = _factor(inner, inner.number("factor", 1.0))
        spec = replace(spec, factor=factor, rotated_pairs=int(share * rotary_dim // 2))
    return spec


def context_length(rope: RopeSpec | None, max_position: int) -> int:
    """Count the positions that the model can use: yarn configs may state only the length before extension."""
    extended = (
        int(rope.factor * rope.original_max_position) if rope is not None and rope.kind == "yarn" else 0
    )
    return max(max_position, extended)


def _rope_object(config: ConfigReader) -> ConfigReader | None:
    """Find the object that describes the rope, under either of its names."""
    older = config.section("rope_scaling")
    if older is not None and older.values():
        given = config.get("rope_parameters") if config.given("rope_parameters") is not None else None
        if given and given != older.values():
            raise ModelError(f"{config.where}: rope_parameters and rope_scaling differ; keep one of them")
        return older
    return config.section("rope_parameters")


def _by_layer_kind(inner: ConfigReader) -> bool:
    return any(isinstance(value, Mapping) for value in inner.values().values())


def _factor(reader: ConfigReader, value: float) -> float:
    if not 1 / MAX_FACTOR <= value <= MAX_FACTOR:
        raise reader.wrong("factor", value, f"from {1 / MAX_FACTOR} to {MAX_FACTOR}")
    return value


def _original(config: ConfigReader, inner: ConfigReader, max_position: int) -> int:
    """Read the length of the first training. The config's own key prevails in transformers, so both must agree."""
    key = "original_max_position_embeddings"
    outer, own = config.optional_integer(key, low=2), inner.optional_integer(key, low=2)
    if outer is not None and own is not None and outer != own:
        by = "" if config.given(key) else " by default"
        raise ModelError(
            f"{inner.where}: {key} is {own}, and that of the config is {outer}{by}; make both equal"
        )
    return outer or own or max_position


def _longrope(config: ConfigReader, reader: ConfigReader, spec: RopeSpec, max_position: int) -> RopeSpec:
    """Read the factors for texts longer than the length that the model was first trained for, and for shorter ones."""
    original = _original(config, reader, max_position)
    factors = {}
    for key in ("short_factor", "long_factor"):
        values = reader.get(key)
        if (
            not isinstance(values, list)
            or len(values) != spec.rotary_dim // 2
            or not all(isinstance(v, (int, float)) and 1 / MAX_FACTOR <= v <= MAX_FACTOR for v in values)
        ):
            raise reader.wrong(
                key, values, f"{spec.rotary_dim // 2} numbers from {1 / MAX_FACTOR} to {MAX_FACTOR}"
            )
        factors[key] = tuple(float(v) for v in values)
    factor = reader.optional_number("factor")
    return replace(
        spec,
        factor=_factor(reader, max_position / original if factor is None else factor),
        original_max_position=original,
        attention_factor=reader.optional_number("attention_factor"),
        factors=factors["long_factor"],
        short_factors=factors["short_factor"],
    ).for_length(max_position)


def _llama3(config: ConfigReader, reader: ConfigReader, spec: RopeSpec, max_position: int) -> RopeSpec:
    low, high = reader.number("low_freq_factor"), reader.number("high_freq_factor")
    if high < low:
        raise ModelError(f"{reader.where}: high_freq_factor must be at least low_freq_factor")
    return replace(
        spec,
        factor=_factor(reader, reader.number("factor")),
        original_max_position=_original(config, reader, max_position),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(config: ConfigReader, reader: ConfigReader, spec: RopeSpec, max_position: int) -> RopeSpec:
    original = _original(config, reader, max_position)
    factor = reader.optional_number("factor")
    return replace(
        spec,
        factor=_factor(reader, max_position / original if factor is None else factor),
        original_max_position=original,
        beta_fast=reader.optional_number("beta_fast") or 32.0,
        beta_slow=reader.optional_number("beta_slow") or 1.0,
        attention_factor=reader.optional_number("attention_factor"),
        mscale=reader.optional_number("mscale"),
        mscale_all_dim=reader.optional_number("mscale_all_dim"),
        truncate=reader.boolean("truncate", True),
    )
