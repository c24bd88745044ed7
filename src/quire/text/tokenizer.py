"""Text to token ids and ids to exact bytes, over the `tokenizers` library. Knows a directory's files.

Reads a directory's tokenizer.json as it is; from older files, `vocab` builds the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken, processors

from quire.errors import ModelError, RequestError
from quire.files import read_bytes, read_json, read_text
from quire.lazy import Lazy
from quire.text.panics import panics_as
from quire.text.pieces import MAX_FILE, Pieces, VisiblePieces

if TYPE_CHECKING:
    from quire.text import vocab
    from quire.text.template import render
    from quire.text.template.render import ChatTemplate
else:
    render, vocab = Lazy("quire.text.template.render"), Lazy("quire.text.vocab")

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
SAMPLE = "Aa 1 \u00e9\u0301\ufb01\u3042\n"  # what normalizers change
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\r?\n")


@dataclass(slots=True)
class TokenizerOptions:
    """Settings from the files beside the vocabulary.

    `add_bos` and `add_eos` None leave special tokens to the tokenizer's own post-processor.
    `named` holds special tokens by role ("bos_token": "<s>"); `declared` maps id to a token and its flags.
    """

    named: dict[str, str] = field(default_factory=dict)
    additional: list[str] = field(default_factory=list)
    declared: dict[int, dict[str, Any]] = field(default_factory=dict)
    add_bos: bool | None = None
    add_eos: bool | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    chat_template: str | dict[str, str] | None = None


class Tokenizer:
    """One tokenizer. Methods only read, so threads may share it.

    `backend` is the library's tokenizer, to be read and not changed. `special_tokens` maps a role to its
    text, as chat templates see it. `eos_token_ids` are all ids that end a text: the tokenizer's own and those
    of generation_config.json.
    """

    def __init__(self, backend: tokenizers.Tokenizer, options: TokenizerOptions | None = None) -> None:
        options = options or TokenizerOptions()
        backend.no_truncation()
        backend.no_padding()
        _add_special(backend, options)
        self.backend = backend
        self.chat_template = options.chat_template
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.special_tokens: dict[str, Any] = {n: t for n, t in options.named.items() if self._known(t)}
        if options.additional:
            self.special_tokens["additional_special_tokens"] = list(options.additional)
        self._added, self._special = _special_ids(backend, options)
        self.bos_token_id = self._named_id("bos_token", options.bos_token_id)
        eos = self._named_id("eos_token", None)
        ends = [] if eos is None else [eos]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*ends, *options.eos_token_ids]))
        self.eos_token_id = self.eos_token_ids[0] if self.eos_token_ids else None
        self._set_ends(options)
        self._pieces = Pieces(backend)
        self._visible = VisiblePieces(self._pieces, self._special)
        self._template: ChatTemplate | None = None

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read the tokenizer of a local model directory. Raises ModelError for missing or broken files."""
        directory = Path(path)
        if not directory.is_dir():
            raise ModelError(f"tokenizer directory {directory} does not exist")
        config = _optional(directory / "tokenizer_config.json")
        options = _read_options(directory, config)
        return cls(_read_backend(directory, config, options), options)

    def save(self, directory: Path) -> None:
        """Write the files that `load` makes the same tokenizer of. Raises ModelError if no file can say it."""
        copy = tokenizers.Tokenizer.from_str(self.backend.to_str())
        if self._own_ends:
            ends = {self.id_to_token(i) or "": i for i in [*self._prefix, *self._suffix]}
            before, after = (
                [self.id_to_token(i) or "" for i in part] for part in (self._prefix, self._suffix)
            )
            try:
                copy.post_processor = processors.TemplateProcessing(
                    single=[*before, "$A", *after], special_tokens=list(ends.items())
                )
            except Exception as error:  # the library raises bare Exception
                raise ModelError(f"the tokenizer's first and last tokens cannot be saved: {error}") from error
        (directory / "tokenizer.json").write_text(_quick_to_read(copy.to_str()), "utf-8")
        config = dict(self.special_tokens)
        if isinstance(self.chat_template, dict):
            named = [{"name": name, "template": text} for name, text in self.chat_template.items()]
            config["chat_template"] = named
        elif self.chat_template is not None:
            config["chat_template"] = self.chat_template
        (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
        generation = {"eos_token_id": list(self.eos_token_ids)} if self.eos_token_ids else {}
        (directory / "generation_config.json").write_text(json.dumps(generation), "utf-8")

    def _known(self, token: str) -> bool:
        return self.backend.token_to_id(token) is not None

    def _named_id(self, role: str, default: int | None) -> int | None:
        token = self.special_tokens.get(role)
        return default if token is None else self.token_to_id(token)

    def _set_ends(self, options: TokenizerOptions) -> None:
        """Set what `add_special_tokens` adds: our own ends if the options name them."""
        self._own_ends = options.add_bos is not None or options.add_eos is not None
        self._prefix: list[int] = []
        self._suffix: list[int] = []
        if options.add_bos:
            if self.bos_token_id is None:
                raise ModelError(
                    "tokenizer_config.json sets add_bos_token, but its bos_token is not in the vocabulary"
                )
            self._prefix = [self.bos_token_id]
        if options.add_eos:
            if self.eos_token_id is None:
                raise ModelError(
                    "tokenizer_config.json sets add_eos_token, but its eos_token is not in the vocabulary"
                )
            self._suffix = [self.eos_token_id]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode `text` to token ids. Raises RequestError if it is not valid Unicode."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Encode each text to token ids, in parallel and without the GIL."""
        for text in texts:
            check_text(text)
        theirs = add_special_tokens and not self._own_ends
        with panics_as(_cannot_encode):
            rows = [e.ids for e in self.backend.encode_batch_fast(list(texts), add_special_tokens=theirs)]
        if add_special_tokens and (self._prefix or self._suffix):
            rows = [self._prefix + row + self._suffix for row in rows]
        return rows

    def offsets(self, text: str, add_special_tokens: bool = True) -> list[tuple[int, int]]:
        """Locate each token of `encode` in `text`: begin and end in characters; (0, 0) for added tokens."""
        check_text(text)
        theirs = add_special_tokens and not self._own_ends
        places: list[tuple[int, int]] = list(self.backend.encode(text, add_special_tokens=theirs).offsets)
        added = add_special_tokens
        return [(0, 0)] * (len(self._prefix) * added) + places + [(0, 0)] * (len(self._suffix) * added)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Encode two texts together, special tokens added: ids, and the segment (0 or 1) of each."""
        check_text(first)
        check_text(second)
        with panics_as(_cannot_encode):
            encoded = self.backend.encode(first, second)
        return encoded.ids, encoded.type_ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Decode `ids` as a whole. Ids without a token add nothing; ill-formed UTF-8 becomes U+FFFD.

        Equal to the library's decoding where the bytes are valid UTF-8. In an ill-formed run of byte-fallback
        tokens the library replaces every byte of the run; here, as with byte-level BPE, each ill-formed part
        becomes one U+FFFD (Unicode 15, section 3.9), so that text can stream.
        """
        table = self.pieces(skip_special_tokens)
        tokens = list(dropwhile(lambda t: not table[t], ids))
        if not tokens:
            return ""
        data = self._pieces.at_start(tokens[0]) + b"".join([table[t] for t in tokens[1:]])
        return data.decode("utf-8", "replace")

    def pieces(self, skip_special_tokens: bool) -> Mapping[int, bytes]:
        """Map ids to the bytes added inside a text, computed on access; skipped special tokens add nothing."""
        return self._visible if skip_special_tokens else self._pieces

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes the token adds after other text (special: its name); b"" for no token."""
        return self._pieces[token_id]

    def start_bytes(self, token_id: int) -> bytes:
        """Return `token_bytes` at the start of a text (without sentencepiece's leading space)."""
        return self._pieces.at_start(token_id)

    @property
    def joins_with_space(self) -> bool:
        """Whether decoding puts a space between any two tokens (a tokenizer without a decoder)."""
        return self._pieces.joins_with_space

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` hides the token."""
        return token_id in self._special

    def is_added(self, token_id: int) -> bool:
        """Whether the token was added to the vocabulary as a whole, special or not."""
        return token_id in self._added

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> str | list[int]:
        """Render a conversation by the model's chat template, or another one, as transformers' tokenizers do.

        Returns token ids, or text with `tokenize` false. ModelError: there is no template. RequestError: it cannot be
        rendered.
        """
        if chat_template is not None or self._template is None:
            template = render.ChatTemplate.load(self, chat_template)
            self._template = template if chat_template is None else self._template
        else:
            template = self._template
        text = template.render(
            conversation,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def token_to_id(self, token: str) -> int | None:
        found: int | None = self.backend.token_to_id(token)
        return found

    def id_to_token(self, token_id: int) -> str | None:
        found: str | None = self.backend.id_to_token(token_id)
        return found


def _cannot_encode(message: str) -> RequestError:
    return RequestError(f"the model's tokenizer cannot encode this text: {message:.500}", "prompt")


def check_text(text: object, param: str = "prompt") -> None:
    """Raise RequestError if `text` is not a string that UTF-8 can express."""
    if not isinstance(text, str):
        raise RequestError(f"{param} must be a string, got {type(text).__name__}", param)
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = f"U+{ord(text[error.start]):04X}"
        raise RequestError(
            f"{param} is not valid Unicode: lone surrogate {code} at {error.start}; send valid UTF-8",
            param,
        ) from error


def _special_ids(
    backend: tokenizers.Tokenizer, options: TokenizerOptions
) -> tuple[frozenset[int], frozenset[int]]:
    """Collect the ids of all added tokens, and of the special ones."""
    added = backend.get_added_tokens_decoder()
    special = {i: bool(token.special) for i, token in added.items()}
    special.update({i: bool(spec.get("special")) for i, spec in options.declared.items()})
    for token in [*options.named.values(), *options.additional]:
        token_id = backend.token_to_id(token)
        if token_id is not None:
            special[token_id] = True
    return frozenset(added), frozenset(i for i, flag in special.items() if flag)


def _add_special(backend: tokenizers.Tokenizer, options: TokenizerOptions) -> None:
    """Add what tokenizer_config.json declares and the vocabulary lacks; ids must come out as declared."""
    added = backend.get_added_tokens_decoder()
    for token_id, spec in sorted(options.declared.items()):
        if token_id in added and added[token_id].content == spec["content"]:
            continue
        flags = {
            k: bool(spec[k])
            for k in ("lstrip", "rstrip", "single_word", "normalized", "special")
            if k in spec
        }
        backend.add_tokens([AddedToken(spec["content"], **flags)])
        got = backend.token_to_id(spec["content"])
        if got != token_id:
            raise ModelError(
                f"tokenizer_config.json gives {spec['content']!r} the id {token_id}, the vocabulary {got}; "
                "the files are of different models"
            )
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in [*options.named.values(), *options.additional]:
        if token not in known and backend.token_to_id(token) is not None:
            backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _token_text(value: object, where: str) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    if value is None or is_text(value):
        return str(value) if value else None
    raise ModelError(f"tokenizer_config.json: {where} must be a string of Unicode, got {value!r:.80}")


def is_text(value: object) -> bool:
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
            or not is_text(spec.get("content"))
        ):
            raise ModelError(
                f"tokenizer_config.json: added_tokens_decoder[{key!r}] must be a token with its content"
            )
        found[int(key)] = spec
    return found


def _read_options(directory: Path, config: dict[str, Any]) -> TokenizerOptions:
    names = _optional(directory / "special_tokens_map.json")
    model = _optional(directory / "config.json")
    generation = _optional(directory / "generation_config.json")
    ends = generation.get("eos_token_id")
    if ends is None:
        ends = model.get("eos_token_id")
    bos = _ids(generation.get("bos_token_id", model.get("bos_token_id")), "bos_token_id")
    options = TokenizerOptions(
        declared=_declared(config),
        add_bos=_flag(config, "add_bos_token"),
        add_eos=_flag(config, "add_eos_token"),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_ids(ends, "eos_token_id"),
        chat_template=read_templates(directory, config),
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
    return options


def read_templates(directory: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
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


def _read_backend(directory: Path, config: dict[str, Any], options: TokenizerOptions) -> tokenizers.Tokenizer:
    """Build from the best file available, and complete `options` from it."""
    full = directory / "tokenizer.json"
    if full.exists():
        # Its post-processor already defines what is added; transformers 5 ignores the config's flags here too.
        options.add_bos = options.add_eos = None
        return _read_full(full)
    if (directory / "tokenizer.model").exists():
        return _from_model_file(directory / "tokenizer.model", config, options)
    kind = config.get("tokenizer_class") or _optional(directory / "config.json").get("model_type")
    for names, merges, known in (("vocab.json", "merges.txt", None), ("encoder.json", "vocab.bpe", "gpt2")):
        if (directory / names).exists() and (directory / merges).exists():
            options.named.setdefault("eos_token", "<|endoftext|>")
            return vocab.from_merges(directory / names, directory / merges, known or kind)
    raise ModelError(
        f"{directory} has no tokenizer: needs tokenizer.json, tokenizer.model, or vocab.json with merges.txt"
    )


def _read_full(path: Path) -> tokenizers.Tokenizer:
    """tokenizer.json. A text is encoded too, since the library finds some faults only then."""
    data = read_bytes(path, MAX_FILE)

    def wrong(error: object) -> ModelError:
        return ModelError(f"{path} cannot be read ({error!s:.500}); download it again")

    with panics_as(wrong):
        try:
            backend = tokenizers.Tokenizer.from_buffer(data)
            backend.encode(SAMPLE)
        except Exception as error:  # the library raises bare Exception
            raise wrong(error) from error
    return backend


def _quick_to_read(text: str) -> str:
    """The same tokenizer.json with merges as strings if possible: the library reads those a quarter faster."""
    content = json.loads(text)
    merges = content["model"].get("merges", [])
    if content["model"]["type"] == "BPE" and not any(" " in part for merge in merges for part in merge):
        content["model"]["merges"] = [" ".join(merge) for merge in merges]
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))


def _from_model_file(path: Path, config: dict[str, Any], options: TokenizerOptions) -> tokenizers.Tokenizer:
    if _TIKTOKEN_LINE.match(read_bytes(path, MAX_FILE)):
        options.named.setdefault("bos_token", "<|begin_of_text|>")
        options.named.setdefault("eos_token", "<|end_of_text|>")
        backend = vocab.from_ranks(path)
    else:
        backend, model = vocab.from_sentencepiece(path, legacy=config.get("legacy") is not False)
        for role, index in (
            ("bos_token", model.bos_id),
            ("eos_token", model.eos_id),
            ("unk_token", model.unk_id),
        ):
            if 0 <= index < len(model.pieces):
                options.named.setdefault(role, model.pieces[index][0])
    if options.add_bos is None:
        options.add_bos = "bos_token" in options.named
    return backend
