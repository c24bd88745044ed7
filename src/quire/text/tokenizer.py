"""Text to token ids and ids to exact bytes, over the `tokenizers` library. Knows a directory's files.

Reads a directory's tokenizer.json as it is; from older files, `vocab` builds the same.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken

from quire.errors import ModelError, RequestError
from quire.files import read_bytes
from quire.lazy import Lazy
from quire.text.pieces import MAX_FILE, Pieces, VisiblePieces
from quire.text.side_files import TokenizerOptions, optional, read_options


@contextmanager
def panics_as(make: Callable[[str], Exception]) -> Iterator[None]:
    """Raise `make(message)` for a panic inside. Its class is found by name: no module exports it."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise make(str(error)) from error


if TYPE_CHECKING:
    from quire.text import vocab
    from quire.text.template import render
    from quire.text.template.render import ChatTemplate
    from quire.types import ModelCard
else:
    render, vocab = Lazy("quire.text.template.render"), Lazy("quire.text.vocab")

log = logging.getLogger(__name__)

SAMPLE = "Aa 1 \u00e9\u0301\ufb01\u3042\n"  # what normalizers change


class Tokenizer:
    """One tokenizer. Methods but `fit` only read, so threads may share it.

    `backend` is the library's tokenizer, to be read and not changed. `special_tokens` maps a role to its
    text, as chat templates see it. `eos_token_ids` are all ids that end a text: the tokenizer's own and those
    of generation_config.json.
    """

    def __init__(self, backend: tokenizers.Tokenizer, options: TokenizerOptions | None = None) -> None:
        options = options or TokenizerOptions()
        self._where, self.lower = options.where, options.lower
        self._rows: int | None = None  # of the model; sys.maxsize: it has one for every token
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
        config = optional(directory / "tokenizer_config.json")
        options = read_options(directory, config)
        return cls(_read_backend(directory, config, options), options)

    def _known(self, token: str) -> bool:
        return self.backend.token_to_id(token) is not None

    def _named_id(self, role: str, default: int | None) -> int | None:
        token = self.special_tokens.get(role)
        return default if token is None else self.token_to_id(token)

    def _set_ends(self, options: TokenizerOptions) -> None:
        """Set what `add_special_tokens` adds: our own ends if the options name them."""
        self.own_ends = options.add_bos is not None or options.add_eos is not None
        self.prefix: list[int] = []
        self.suffix: list[int] = []
        if options.add_bos and (self.bos_token_id is not None or "bos_token" in options.named):
            if self.bos_token_id is None:
                raise ModelError(
                    "tokenizer_config.json sets add_bos_token, but its bos_token is not in the vocabulary"
                )
            self.prefix = [self.bos_token_id]
        if options.add_eos and (self.eos_token_id is not None or "eos_token" in options.named):
            if self.eos_token_id is None:
                raise ModelError(
                    "tokenizer_config.json sets add_eos_token, but its eos_token is not in the vocabulary"
                )
            self.suffix = [self.eos_token_id]

    def fit(self, rows: int) -> Tokenizer:
        """Refuse texts with tokens for which a model of `rows` tokens has no row, from now on; returns itself."""
        if self._rows is None:
            last = max([self.vocab_size - 1, *self._added])
            vocabulary = self.backend.get_vocab(with_added_tokens=True) if last >= rows else {}
            beyond = sorted((i, token) for token, i in vocabulary.items() if i >= rows)
            self._rows = rows if beyond else sys.maxsize
            if beyond:
                log.warning(
                    "%s: %d tokens have no row in the model of %d (%s = %d ...): texts that hold them are refused",
                    self._where,
                    len(beyond),
                    rows,
                    *reversed(beyond[0]),
                )
        return self

    def ends(self, model_ends: Iterable[int], rows: int) -> tuple[int, ...]:
        """Return the tokens that end an answer of a model of `rows` tokens: the model's own and the tokenizer's."""
        return tuple(i for i in dict.fromkeys([*model_ends, *self.eos_token_ids]) if i < rows)

    def meet(self, card: ModelCard) -> ModelCard:
        """Fit the tokenizer to a model, and return its card with the tokenizer's ends too."""
        self.fit(card.num_rows)
        return replace(card, eos_token_ids=self.ends(card.eos_token_ids, card.num_rows))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode `text` to token ids. Raises RequestError if it is not valid Unicode."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, drop: bool = False
    ) -> list[list[int]]:
        """Encode each text to token ids, in parallel and without the GIL.

        RequestError for tokens that a model has no row for; `drop` gives no tokens instead.
        """
        for text in texts:
            check_text(text)
        theirs = add_special_tokens and not self.own_ends
        with panics_as(_cannot_encode):
            given = [text.lower() for text in texts] if self.lower else list(texts)
            rows = [e.ids for e in self.backend.encode_batch_fast(given, add_special_tokens=theirs)]
        if add_special_tokens and (self.prefix or self.suffix):
            rows = [self.prefix + row + self.suffix for row in rows]
        if self._rows is not None and self._rows < sys.maxsize:
            rows = [[] if drop and max(row, default=0) >= self._rows else self._checked(row) for row in rows]
        return rows

    def _checked(self, row: list[int]) -> list[int]:
        for token in row:
            if self._rows is not None and token >= self._rows:
                raise RequestError(
                    f"the model has no row for the token {self.id_to_token(token)!r} ({token}) of this text: its "
                    f"vocabulary has {self._rows} tokens; leave it out",
                    "prompt",
                )
        return row

    def offsets(self, text: str, add_special_tokens: bool = True) -> list[tuple[int, int]]:
        """Locate each token of `encode` in `text`: begin and end in characters; (0, 0) for added tokens."""
        check_text(text)
        theirs = add_special_tokens and not self.own_ends
        given = text.lower() if self.lower else text
        places: list[tuple[int, int]] = list(self.backend.encode(given, add_special_tokens=theirs).offsets)
        added = add_special_tokens
        return [(0, 0)] * (len(self.prefix) * added) + places + [(0, 0)] * (len(self.suffix) * added)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Encode two texts together, special tokens added: ids, and the segment (0 or 1) of each."""
        check_text(first)
        check_text(second)
        with panics_as(_cannot_encode):
            encoded = self.backend.encode(first, second)
        return self._checked(encoded.ids), encoded.type_ids

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

    def hides(self, texts: Iterable[str]) -> bool:
        """Whether `skip_special_tokens` hides one of the texts, which is a special token's."""
        return any(token is not None and self.is_special(token) for token in map(self.token_to_id, texts))

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
            f"{param} is not valid Unicode: lone surrogate {code} at {error.start}; send valid UTF-8", param
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
                f"{options.where}: {spec['content']!r} is declared as {token_id}, and the vocabulary gives it {got}: "
                "the files are of different models"
            )
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in [*options.named.values(), *options.additional]:
        if token not in known and (token in options.adds or backend.token_to_id(token) is not None):
            backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])


def _read_backend(directory: Path, config: dict[str, Any], options: TokenizerOptions) -> tokenizers.Tokenizer:
    """Build from the best file available, and complete `options` from it."""
    full = directory / "tokenizer.json"
    if full.exists():
        # Its post-processor already defines what is added; transformers 5 ignores the config's flags here too.
        options.add_bos = options.add_eos = None
        return _read_full(full)
    return vocab.read_older(directory, config, options)


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
    if "ByteLevel" in str(backend.pre_tokenizer) and "ByteLevel" not in str(backend.decoder):
        log.warning(
            "%s: text is split into bytes and decoded otherwise (%s): outputs may hold letters for spaces, as the "
            "library prints them",
            path,
            type(backend.decoder).__name__,
        )
    return backend
