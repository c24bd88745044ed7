"""Fields of option dataclasses: their help, ranges and other names, and the check of their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from quire.errors import ConfigError

# Other names of values of --quantization, which vLLM has had.
QUANTIZATIONS = {
    "auto_awq": "awq",
    "auto_gptq": "gptq",
    "fp8_per_channel": "fp8",
    "gpt_oss_mxfp4": "mxfp4",
    "int8_per_channel_weight_only": "int8wo",
    "marlin": "gptq",
    "modelopt_mixed": "modelopt",
    "modelopt_mxfp8": "modelopt",
}


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    short: str | None = None,
    common: bool = False,
    aliases: Mapping[str, Any] | None = None,
    writes: Literal["file", "directory"] | None = None,
    replaces: tuple[str, ...] = (),
) -> Any:
    """A dataclass field with its help text, numeric range (inclusive), shorter flag, and other names of values.

    `--help` shows only common fields, or all of a command that has none. A path that it `writes` is tried before its
    work begins. On the command line an option takes the place of those that it `replaces` in a file.
    """
    metadata = {"help": help, "low": low, "high": high, "short": short, "common": common, "aliases": aliases}
    return field(default=default, metadata={**metadata, "writes": writes, "replaces": replaces})


def check_options(config: object) -> None:
    """Raise ConfigError if a field is out of its range or not one of its choices."""
    hints = get_type_hints(type(config))
    for f in fields(config):  # type: ignore[arg-type]
        value, flag = getattr(config, f.name), f.name.replace("_", "-")
        choices = get_args(hints[f.name]) if getattr(hints[f.name], "__origin__", None) is Literal else ()
        if choices and value not in choices:
            raise ConfigError(f"--{flag} must be one of {', '.join(map(str, choices))}, got {value!r}")
        kinds = {hints[f.name], *get_args(hints[f.name])}
        wanted, what = (Integral, "an integer") if int in kinds else (Real, "a number")
        if kinds & {int, float} and str not in kinds and value is not None:
            if not isinstance(value, wanted) or isinstance(value, bool):
                raise ConfigError(f"--{flag} must be {what}, got {value!r}")
        elif bool in kinds and str not in kinds and value not in (True, False, None):
            raise ConfigError(f"--{flag} must be True or False, got {value!r}")
        if value is None or isinstance(value, (bool, str)):
            continue
        low, high = f.metadata.get("low"), f.metadata.get("high")
        if value != value:
            raise ConfigError(f"--{flag} must be a number, got {value}")
        if low is not None and value < low:
            raise ConfigError(f"--{flag} must be at least {low}, got {value}")
        if high is not None and value > high:
            raise ConfigError(f"--{flag} must be at most {high}, got {value}")


def json_object(flag: str, value: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """`value` as a map of options; text is JSON."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise ConfigError(f"{flag} must be a JSON object: {error}") from error
    return dict(value or {})
