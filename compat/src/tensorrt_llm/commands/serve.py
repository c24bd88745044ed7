"""`trtllm-serve MODEL`: the server, on this machine alone unless told otherwise."""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

import quire.cli
from quire.config import option
from quire.errors import ConfigError
from tensorrt_llm.llmapi.llm import engine_options
from tensorrt_llm.options import SERVING


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeArguments:
    """Options of `trtllm-serve`."""

    model: str = option("", "A Hugging Face id, a checkpoint, a converted one, or an engine directory.")
    tokenizer: str | None = option(None, "Directory or id of the tokenizer.")
    host: str = option("localhost", "Address to listen on.")
    port: int = option(8000, "Port to listen on.", low=1, high=65535)
    max_batch_size: int | None = option(None, "Most sequences that run at once.", low=1)
    max_num_tokens: int | None = option(None, "Most tokens computed in one step.", low=1)
    max_seq_len: int | None = option(None, "Longest prompt plus output, in tokens.", low=1)
    tp_size: int | None = option(None, "Ranks that divide each layer.", low=1)
    tensor_parallel_size: int | None = option(None, "Another name of --tp_size.", low=1)
    pp_size: int | None = option(None, "Stages that divide the layers.", low=1)
    pipeline_parallel_size: int | None = option(None, "Another name of --pp_size.", low=1)
    kv_cache_dtype: str | None = option(None, "Type of the KV cache: auto, int8, fp8.")
    free_gpu_memory_fraction: float | None = option(None, "Share of free memory.", low=0.01, high=1.0)
    kv_cache_free_gpu_memory_fraction: float | None = option(
        None, "Another name of --free_gpu_memory_fraction.", low=0.01, high=1.0
    )
    revision: str | None = option(None, "Branch, tag or commit of the model on the hub.")
    reasoning_parser: str | None = option(None, "Format of the model's reasoning.")
    tool_parser: str | None = option(None, "Format of the model's tool calls.")
    chat_template: str | None = option(None, "File with a chat template, or the template itself.")
    extra_llm_api_options: str | None = option(None, "YAML file with options of LLM; they prevail.")
    config: str | None = option(None, "Another name of --extra_llm_api_options.")


def run(arguments: ServeArguments) -> None:
    if not arguments.model:
        raise ConfigError("name the model: trtllm-serve MODEL")
    given = asdict(arguments)
    own = {name: given.pop(name) for name in ("model", "host", "port", "extra_llm_api_options", "config")}
    extra = own["extra_llm_api_options"] or own["config"]
    given |= {} if extra is None else read_options(extra)
    words = server_words(engine_options(given))
    quire.cli.main(["serve", own["model"], "--host", own["host"], "--port", str(own["port"]), *words])


def read_options(path: str) -> dict[str, Any]:
    """The options in a YAML file. ConfigError if it holds none."""
    try:
        found = yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold options by name")
    return found


def server_words(options: Mapping[str, Any]) -> list[str]:
    """Options as flags of `quire`."""
    words = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, tuple):
            words += [f"--{flag}", *value]
        else:
            words.append(f"--{flag}={json.dumps(value) if isinstance(value, dict) else value}")
    return words


COMMAND = quire.cli.Command(
    run, ServeArguments, ("model",), uses=frozenset(), foreign=lambda: SERVING.foreign
)
PROGRAM = quire.cli.Program.single("trtllm-serve", __name__, "Serve a model over HTTP with OpenAI's API.")


def main(argv: list[str] | None = None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    quire.cli.main(words[1:] if words[:1] == ["serve"] else words, PROGRAM)


if __name__ == "__main__":
    main()
