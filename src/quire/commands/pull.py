"""`quire pull`: fetches a model of the hub, once it is known to be supported and to have room."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from quire.cli import Command
from quire.config import ModelConfig, check_options, option
from quire.engine.directory import model_directory
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOptions:
    """Options of `quire pull`."""

    model: str = option("", "A Hugging Face id: owner/name, or owner/name:Q4_K_M for a GGUF file.")
    revision: str | None = option(None, "Branch, tag or commit.")
    download_dir: str | None = option(None, "Where to fetch to; default is the cache of the hub's client.")
    hf_token: str | None = option(None, "Token for private models; default is that of `hf auth login`.")

    def __post_init__(self) -> None:
        check_options(self)


def run(options: PullOptions) -> None:
    """Print the place of the model when it is there."""
    if not options.model:
        raise ConfigError("name the model: quire pull owner/name")
    print(model_directory(ModelConfig(**asdict(options))))


COMMAND = Command(run, PullOptions, arguments=("model",), engine=False)
