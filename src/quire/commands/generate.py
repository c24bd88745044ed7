"""`quire generate`: continue a text in the terminal, printing it as it comes."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, fields, replace
from typing import Any

from quire.cli import Command, ignore_interrupts
from quire.commands.screen import Paper
from quire.config import EngineConfig, check_options, option
from quire.errors import ConfigError, RequestError
from quire.flags.uses import ONE_TEXT
from quire.llm import LLM
from quire.params import SamplingParams
from quire.text.stdin import read_text
from quire.weights.hub import is_cached, local


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Sampling parameters that are worth a flag; unset ones take the model's own defaults."""

    max_tokens: int = option(256, "Most tokens to write.", low=1)
    temperature: float | None = option(None, "0 always takes the most likely token.", low=0)
    top_p: float | None = option(
        None, "Keep the smallest set of tokens with this probability.", low=0, high=1
    )
    top_k: int | None = option(None, "Keep this many tokens; 0 for all.")
    min_p: float | None = option(
        None, "Drop tokens below this share of the best one's probability.", low=0, high=1
    )
    repetition_penalty: float | None = option(None, "Above 1, seen tokens become less likely.")
    sampling_seed: int | None = option(None, "Same seed, same text.")

    def __post_init__(self) -> None:
        check_options(self)
        try:
            SamplingParams(**self.settings())
        except RequestError as error:
            flag = "--" + str(error.param).replace("_", "-")
            raise ConfigError(str(error).replace(str(error.param), flag, 1)) from error

    def settings(self) -> dict[str, Any]:
        """Collect the parameters that are set, by their names in SamplingParams and in the API."""
        given: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(SamplingOptions)}
        given["seed"] = given.pop("sampling_seed")
        return {name: value for name, value in given.items() if value is not None}

    def params(self, llm: LLM) -> SamplingParams:
        return llm.default_params(**self.settings())


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions(SamplingOptions):
    """Options of `quire generate`."""

    prompt: str = option(
        "",
        "The text to continue; without it, or with -, read it from standard input. Or the model of a text.",
    )
    text: str = option("", "The text to continue, if a model comes first.")


def run(config: EngineConfig, options: GenerateOptions) -> None:
    text = options.prompt
    if options.text:
        if config.model.model:
            raise ConfigError(f"{text} and --model {config.model.model} are two models: leave one out")
        config, text = replace(config, model=replace(config.model, model=text)), options.text
    elif not config.model.model and _is_model(text, config.model.download_dir):
        raise ConfigError(
            f"{text} names a model, and no text follows: quire generate {text} TEXT; a text that looks like a name can "
            "come from standard input"
        )
    piped = text == "-" or (not text and not sys.stdin.isatty())
    prompt = read_text(sys.stdin.buffer) if piped else text
    llm = LLM.from_config(config)
    shown = 0
    paper = Paper(sys.stdout)
    paper.write(prompt)
    for output in llm.stream(prompt, options.params(llm)):
        text = output.outputs[0].text
        paper.write(text[shown:])
        shown = len(text)
    paper.write("\n")
    ignore_interrupts()


def _is_model(text: str, folder: str | None) -> bool:
    """Whether a prompt is a model's path or name: of the package, as on the hub, or of one that is in its cache."""
    path = local(text)
    if path is None:
        named = re.fullmatch(r"[\w.-]+/[\w.-]*[\w](:[\w.-]+)?", text)
        return named is not None or (re.fullmatch(r"[\w.-]+", text) is not None and is_cached(text, folder))
    return path.suffix == ".gguf" or (path / "config.json").is_file()


COMMAND = Command(run, GenerateOptions, arguments=("prompt", "text"), uses=ONE_TEXT)
