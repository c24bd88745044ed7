"""Tokenizers made on the spot, model directories linked together from the shared test data, and public templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, WordLevel

from quire.text.side_files import TokenizerOptions
from quire.text.template.process import TemplateProcess
from quire.text.tokenizer import Tokenizer
from tests.shared import DATA, cases_of

FOLDER = DATA / "templates-llamacpp"
# Templates that no history fits: they ask for tools, or for what Jinja has not.
BROKEN = ("MiroThinker", "llama-cpp-deepseek-r1")
EVERY_TEMPLATE = pytest.mark.parametrize(
    "path",
    cases_of(FOLDER, [path for path in sorted(FOLDER.glob("*.jinja")) if path.stem not in BROKEN]),
    ids=lambda path: getattr(path, "stem", "absent"),
)
TEXT = [
    "the cat sat on the mat, the cats sit",
    "naïve café über Größe",
    "日本語 テスト 🦙🦙",
    "x = 1\n\ny = 2\t# ok",
]


def byte_level_backend() -> Backend:
    """Byte-level BPE over all 256 bytes, with some merges that cross UTF-8 borders, and two added tokens."""
    backend = Backend(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXT * 4, trainer)
    backend.add_special_tokens([AddedToken("<|end|>", normalized=False, special=True)])
    backend.add_tokens([AddedToken("<tool>", normalized=False, special=False)])
    return backend


def metaspace_backend() -> Backend:
    """Llama 2's kind: a mark for spaces, byte tokens for characters outside the vocabulary."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("c", "a"), ("▁", "ca"), ("▁", "▁")]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz .,\n"]
    pieces += [p for p in letters if p not in pieces] + [a + b for a, b in merges] + ["é", "日"]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    backend = Backend(BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t in ("<unk>", "<s>", "</s>")]
    )
    return backend


def old_metaspace_backend() -> Backend:
    """As old conversions made it: the Metaspace decoder, which drops the space of the first token."""
    backend = metaspace_backend()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", "always")])
    return backend


def words_backend() -> Backend:
    """No decoder at all: the library joins tokens with spaces."""
    backend = Backend(WordLevel({"the": 0, "cat": 1, "sat": 2, "[UNK]": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ("<a>", "<b>")])
    return backend


BACKENDS: dict[str, Callable[[], Backend]] = {
    "byte_level": byte_level_backend,
    "metaspace": metaspace_backend,
    "old_metaspace": old_metaspace_backend,
    "words": words_backend,
}


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    """One process for all templates that do no harm."""
    process = TemplateProcess(60.0)
    yield process
    process.close()


@pytest.fixture(scope="session")
def tiny() -> dict[str, Tokenizer]:
    return {name: Tokenizer(make(), TokenizerOptions()) for name, make in BACKENDS.items()}


@pytest.fixture(scope="session")
def load(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tokenizer]:
    """Load a tokenizer from data files linked under the names a model directory gives them; once per set."""
    loaded: dict[str, Tokenizer] = {}

    def load_files(files: dict[str, str], config: dict[str, object] | None = None) -> Tokenizer:
        key = json.dumps([files, config])
        if key not in loaded:
            directory = tmp_path_factory.mktemp("model")
            for name, source in files.items():
                (directory / name).symlink_to(data / source)
            if config is not None:
                (directory / "tokenizer_config.json").write_text(json.dumps(config))
            loaded[key] = Tokenizer.load(directory)
        return loaded[key]

    return load_files
