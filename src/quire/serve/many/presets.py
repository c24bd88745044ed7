"""Reads llama.cpp's presets: an INI file with a section for each model, of llama-server's options by name."""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import msgspec

from quire.errors import ConfigError, ModelError
from quire.files import read_bytes
from quire.flags.words import NEEDLESS, OPTIONS
from quire.params import SamplingParams
from quire.spelling import nearest

SKIPPED = {"version", "stop-timeout", "ubatch-size", "ub", "ubatch"}
ENTRY = {"model": "path", "served_model_name": "aliases", "load_on_startup": "start"}
ENVIRONMENT = {"n-parallel": "parallel", "batch": "batch-size"}  # where LLAMA_ARG_NAME is not --name
CHOICES = {
    ("max_model_len", "0"),
    ("max_num_seqs", "-1"),
    ("max_tokens", "-1"),
    ("threads", "-1"),
}  # our own ones
VALUES = {"on": "true", "off": "false", "enabled": "true", "disabled": "false", "yes": "true", "no": "false",
    "q8_0": "int8", "f16": "float16", "bf16": "bfloat16", "f32": "float32"}  # fmt: skip


def read_presets(path: str, most: int, options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Read what each section says of a model's entry, by name. A model may have these `options`.

    ConfigError: the file, or one of its words, is not understood.
    """
    called = f"--models-preset {path!r}"
    ini = configparser.ConfigParser(
        None,
        strict=False,
        delimiters="=",
        inline_comment_prefixes=";#",
        default_section="",
        interpolation=None,
    )
    ini.optionxform = str  # type: ignore[assignment,method-assign]
    try:  # above the first section stands the version
        ini.read_string("[*]\n" + read_bytes(Path(path).expanduser(), most).decode())
    except (OSError, ValueError, ModelError, configparser.Error) as error:
        raise ConfigError(f"{called} cannot be read: {' '.join(str(error).split())}") from error
    found: dict[str, dict[str, Any]] = {}
    for name in ini.sections()[1:]:
        values = found[name] = {"name": name, "options": {}}
        for section, (key, text) in ((s, item) for s in ("*", name) for item in ini[s].items()):
            try:
                _take(values, key, text, options)
            except (ConfigError, msgspec.ValidationError) as error:
                raise ConfigError(f"{called}: [{section}]: {key} {error}") from error
    return found


def _take(values: dict[str, Any], key: str, text: str, options: Mapping[str, Any]) -> None:
    """Put an option into the values of an entry."""
    word = key.lower().removeprefix("llama_arg_").replace("_", "-")
    word = ENVIRONMENT.get(word, word)
    flags = [flag for flag in (f"-{word}", f"--{word}") if flag in OPTIONS or flag in NEEDLESS]
    flag = flags[0] if flags else f"--{word}"
    name, text = OPTIONS.get(flag, flag).strip("-").replace("-", "_"), VALUES.get(text, text)
    if word in SKIPPED or flag in NEEDLESS:
        return
    if (name, text) in CHOICES:
        values["options"].pop(name, None)
    elif name in ENTRY:
        given = {
            "path": text,
            "aliases": [one.strip() for one in text.split(",")],
            "start": text in ("true", "1"),
        }
        values[ENTRY[name]] = given[ENTRY[name]]
    elif name in SamplingParams.__struct_fields__:
        changes = values["options"].setdefault("override_generation_config", {})
        changes[name] = msgspec.convert(text, get_type_hints(SamplingParams)[name], strict=False)
    elif name in options and (name != "chat_template" or "{" in text or Path(text).is_file()):
        hint = options[name]
        listed = get_origin(hint) is tuple
        values["options"][name] = msgspec.convert([text] if listed else text, hint, strict=False)
    else:
        raise ConfigError(f"= {text} has no meaning here{nearest(name, options)}")
