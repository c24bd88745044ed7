"""Reads what lies beside a tokenizer's vocabulary: special and added tokens, flags, chat templates."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.errors import ModelError
from quire.files import read_json, read_text
from quire.text.pieces import MAX_FILE

_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
SENTENCE_CONFIGS = tuple(f"sentence_{kind}_config.json" for kind in _KINDS)
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(slots=True)
class TokenizerOptions:
    """Settings from the files beside the vocabulary.

    `add_bos` and `add_eos` None leave special tokens to the tokenizer's own post-processor.
    `named` holds special tokens by role ("bos_token": "<s>"); `declared` maps id to a token and its flags.
    `where` is the file or directory that they are from. `adds` are tokens that a vocabulary may lack.
    `lower`: texts are lowered before anything else.
    """

    where: str = "the tokenizer"
    adds: frozenset[str] = frozenset()
    lower: bool = False
    named: dict[str, str] = field(default_factory=dict)
    additional: list[str] = field(default_factory=list)
    declared: dict[int, dict[str, Any]] = field(default_factory=dict)
    add_bos: bool | None = None
    add_eos: bool | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    chat_template: str | dict[str, str] | None = None


def optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _token_text(value: object, where: str) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    if value is None or _is_text(value):
        return str(value) if value else None
    raise ModelError(f"tokenizer_config.json: {where} must be a string of Unicode, got {value!r:.80}")


def _is_text(value: object) -> bool:
    """Whether a value is text that UTF-8 can express: JSON can escape halves of pairs, which is no Unicode."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _ids(value: object, where: str) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(v) is int and v >= 0 for v in values):
        raise ModelError(f"{where} must be a token id or a list of them, got {value!r}")
    return tuple(values)


def _flag(config: dict[str, Any], name: str) -> bool | None:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"tokenizer_config.json: {name} must be true or false, got {value!r}")
    return value


def _declared(config: dict[str, Any]) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    declared = config.get("added_tokens_decoder") or {}
    if not isinstance(declared, dict):
        raise ModelError(
            f"tokenizer_config.json: added_tokens_decoder must map ids to tokens, got {declared!r:.80}"
        )
    for key, spec in declared.items():
        if (
            not re.fullmatch("[0-9]{1,9}", key)
            or not isinstance(spec, dict)
            or not _is_text(spec.get("content"))
        ):
            raise ModelError(
                f"tokenizer_config.json: added_tokens_decoder[{key!r}] must be a token with its content"
            )
        found[int(key)] = spec
    return found


def read_options(directory: Path, config: dict[str, Any]) -> TokenizerOptions:
    names = optional(directory / "special_tokens_map.json")
    model = optional(directory / "config.json")
    generation = optional(directory / "generation_config.json")
    ends = generation.get("eos_token_id")
    if ends is None:
        ends = model.get("eos_token_id")
    bos = _ids(generation.get("bos_token_id", model.get("bos_token_id")), "bos_token_id")
    options = TokenizerOptions(
        where=str(directory),
        declared=_declared(config),
        add_bos=_flag(config, "add_bos_token"),
        add_eos=_flag(config, "add_eos_token"),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_ids(ends, "eos_token_id"),
        chat_template=_templates(directory, config),
    )
    for role in NAMED_TOKENS:
        token = _token_text(config.get(role, names.get(role)), role)
        if token is not None:
            options.named[role] = token
    more = config.get("additional_special_tokens", names.get("additional_special_tokens")) or []
    extra = config.get("extra_special_tokens") or []
    extra = list(extra.values()) if isinstance(extra, dict) else extra
    for name, values in (("additional_special_tokens", more), ("extra_special_tokens", extra)):
        if not isinstance(values, list):
            raise ModelError(f"tokenizer_config.json: {name} must be a list of tokens, got {values!r:.80}")
    for value in [*more, *extra]:
        token = _token_text(value, "additional_special_tokens")
        if token is not None:
            options.additional.append(token)
    options.lower = sentence_config(directory).get("do_lower_case") is True
    if not (directory / "tokenizer.json").exists():  # it would hold them
        options.adds = frozenset([*options.named.values(), *options.additional])
        for text, token_id in optional(directory / "added_tokens.json").items():
            if type(token_id) is not int or token_id < 0 or not _is_text(text):
                raise ModelError(
                    f"{directory}/added_tokens.json must map tokens to ids, got {text!r:.80}: {token_id!r}"
                )
            options.declared.setdefault(token_id, {"content": text, "normalized": False})
    return options


def sentence_config(directory: Path) -> dict[str, Any]:
    """Read sentence-transformers' settings of texts: the first of seven files, as it does."""
    found = (directory / name for name in SENTENCE_CONFIGS if (directory / name).is_file())
    path = next(found, None)
    return {} if path is None else read_json(path)


def _templates(directory: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """The chat template: chat_template.jinja and additional_chat_templates/, else the config's."""
    found: dict[str, str] = {}
    if (directory / "chat_template.jinja").exists():
        found["default"] = read_text(directory / "chat_template.jinja", MAX_FILE)
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = read_text(path, MAX_FILE)
    if found:
        return found["default"] if set(found) == {"default"} else found
    template = config.get("chat_template")
    if isinstance(template, list):
        try:
            template = {entry["name"]: entry["template"] for entry in template}
        except (KeyError, TypeError) as error:
            raise ModelError(
                "tokenizer_config.json: each chat_template needs a name and a template"
            ) from error
    texts = template.values() if isinstance(template, dict) else [template]
    if template is not None and not all(isinstance(text, str) for text in texts):
        raise ModelError("tokenizer_config.json: chat_template must be a string or a list of named templates")
    return template or None
