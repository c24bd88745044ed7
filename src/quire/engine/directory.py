"""Finds the files of the configured model, and its tokenizer. Knows directories and names; opens no weights."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from quire.config import EngineConfig, ModelConfig, SpeculativeOptions
from quire.files import read_json
from quire.lazy import Lazy
from quire.weights.hub import ASSETS, existing, find_model, local, open_tokenizer

if TYPE_CHECKING:
    from quire.engine import drafter_config, preview
    from quire.text.tokenizer import Tokenizer
else:
    drafter_config = Lazy("quire.engine.drafter_config")
    preview = Lazy("quire.engine.preview")

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
WITHOUT_MODEL = ("ngram", "suffix", "mtp")
"""WITHOUT_MODEL lists the methods of drafting that need no model of their own."""
SHIPPED_MODEL = "quire-stories"


def model_directory(config: ModelConfig, weights: bool = True) -> Path:
    """Find the local directory or GGUF file of the configured model; by default, of the model inside the package.

    A speculator stands for the target that it names. A model of the hub is looked at before its weights are fetched;
    without `weights` they stay there, unless a GGUF file is all there is.
    """
    if config.model and local(config.model) is None:
        preview.check(config)
    path = own_path(config, weights)
    target = verifier_of(path)
    return path if target is None else own_path(replace(config, model=target, revision=None), weights)


def own_path(config: ModelConfig, weights: bool = True) -> Path:
    """Find the configured model as `model_directory` does, without a look ahead; a speculator is itself."""
    name, weights = config.model or str(ASSETS / SHIPPED_MODEL), weights and config.load_format != "dummy"
    return find_model(name, config.revision, config.download_dir, weights, config.hf_token)


def verifier_of(path: Path) -> str | None:
    """Find the target that a speculator's config names: a path, also relative to its own, or an id. None: a model."""
    file = path / "config.json"
    if not path.is_dir() or not file.exists() or not read_json(file).get("speculators_config"):
        return None
    name = (drafter_config.read_drafter(path)["speculators_config"].get("verifier") or {}).get("name_or_path")
    if not name:
        return None
    return str(path / name) if existing(str(path / name)) else name


def speculative_options(config: EngineConfig) -> SpeculativeOptions | None:
    """Choose the drafter: a configured model that is a speculator drafts unless options name another."""
    options, model = config.speculation.options, config.model
    if options is not None and (options.model is not None or options.method in WITHOUT_MODEL):
        return options
    if model.model and verifier_of(own_path(model, weights=False)) is not None:
        return structs.replace(options or SpeculativeOptions(), model=model.model)
    return options


def load_tokenizer(config: ModelConfig) -> Tokenizer:
    """Load the model's tokenizer, or the one configured in its place."""
    if config.tokenizer:
        revision, token = config.tokenizer_revision, config.hf_token
        return open_tokenizer(find_model(config.tokenizer, revision, config.download_dir, False, token))
    return open_tokenizer(model_directory(config, weights=False))


def has_tokenizer(config: ModelConfig) -> bool:
    """Tell whether prompts may be texts. Dummy weights do without a tokenizer if the directory holds none."""
    if config.skip_tokenizer_init or config.tokenizer or config.load_format != "dummy":
        return not config.skip_tokenizer_init
    directory = model_directory(config)
    found = any((directory / name).is_file() for name in TOKENIZER_FILES)
    if not found:
        logger.warning("%s holds no tokenizer: prompts and outputs are token ids", directory)
    return found
