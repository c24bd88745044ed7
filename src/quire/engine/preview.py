"""Looks at a model of the hub before its weights are fetched: what it is, and whether it loads and fits."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from quire.config import ModelConfig
from quire.engine.directory import verifier_of
from quire.engine.source import find_files
from quire.errors import ConfigError, ModelError
from quire.weights.download import sketch_model
from quire.weights.hub import local


def check(config: ModelConfig) -> None:
    """Refuse a model that is not supported. ModelError, ConfigError."""
    with unfetched(config) as seen:
        if seen is not config:
            find_files(seen)


@contextmanager
def unfetched(config: ModelConfig) -> Iterator[ModelConfig]:
    """Give a model with the headers of its weights alone, as a directory that lasts as long as the context.

    The model itself if nothing of it is missing here. Errors name the model as it was configured.
    """
    if not config.model or local(config.model) is not None or config.load_format == "dummy":
        yield config
        return
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        place = Path(folder) / "model"
        seen = sketch_model(config.model, config.revision, config.download_dir, config.hf_token, place)
        target = None if seen is None else verifier_of(seen)
        if target is not None:  # of a speculator
            of_target = replace(config, model=target, revision=None)
            with unfetched(of_target) as found:
                yield config if found is of_target else found
            return
        try:
            yield config if seen is None else replace(config, model=str(seen))
        except (ConfigError, ModelError) as error:
            raise type(error)(str(error).replace(str(seen), config.model)) from error
