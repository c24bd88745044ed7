"""`trtllm-bench --model M throughput|latency|build`: Quire's benchmarks, and a build to measure."""

import sys
from dataclasses import dataclass
from pathlib import Path

import quire.cli
from quire.build import EngineLimits, build_engine
from quire.config import EngineConfig, option
from quire.errors import ConfigError
from tensorrt_llm.commands.serve import read_options, server_words
from tensorrt_llm.llmapi.llm import engine_options
from tensorrt_llm.options import BUILDING, MEASURING
from tensorrt_llm.quantization import QuantConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchArguments:
    """Options of `trtllm-bench throughput` and `latency`."""

    model: str = option("", "The model's name or directory.")
    model_path: str | None = option(None, "Directory of the model, if it is not --model.")
    engine_dir: str | None = option(None, "Engine to measure in place of the model.")
    dataset: str | None = option(
        None, "JSONL of {prompt or input_ids, output_tokens}; without it, random prompts."
    )
    num_requests: int | None = option(
        None, "Number of requests; 0 or absent takes all of the data set.", low=0
    )
    concurrency: int | None = option(None, "Most requests that run at once.", low=-1)
    max_batch_size: int | None = option(None, "Most sequences that run at once.", low=1)
    max_num_tokens: int | None = option(None, "Most tokens computed in one step.", low=1)
    max_seq_len: int | None = option(None, "Longest prompt plus output, in tokens.", low=1)
    tp: int | None = option(None, "Ranks that divide each layer.", low=1)
    pp: int | None = option(None, "Stages that divide the layers.", low=1)
    kv_cache_free_gpu_mem_fraction: float | None = option(None, "Share of free memory.", low=0.01, high=1.0)
    report_json: str | None = option(None, "Write the figures to this JSON file.")
    extra_llm_api_options: str | None = option(None, "YAML file with options of LLM; they prevail.")
    workspace: str | None = option(None, "Directory for what is built.", short="-w")


def run(arguments: BenchArguments, at_once: int | None = None) -> None:
    """Measure requests of a data set, at most `at_once` at a time."""
    model = arguments.engine_dir or arguments.model_path or arguments.model
    at_once = at_once or (arguments.concurrency if (arguments.concurrency or 0) > 0 else None)
    given = {
        "max_batch_size": at_once or arguments.max_batch_size,
        "max_num_tokens": arguments.max_num_tokens,
        "max_seq_len": arguments.max_seq_len,
        "tensor_parallel_size": arguments.tp,
        "pipeline_parallel_size": arguments.pp,
        "free_gpu_memory_fraction": arguments.kv_cache_free_gpu_mem_fraction,
    }
    given |= {} if arguments.extra_llm_api_options is None else read_options(arguments.extra_llm_api_options)
    words = [
        "bench",
        "throughput",
        "--model",
        model,
        "--num-iters",
        "1",
        *server_words(engine_options(given)),
    ]
    for flag, value in (
        ("--dataset-path", arguments.dataset),
        ("--num-prompts", arguments.num_requests or (1 << 20 if arguments.dataset else None)),
        ("--output-json", arguments.report_json),
    ):
        words += [] if value is None else [flag, str(value)]
    quire.cli.main(words)


def run_alone(arguments: BenchArguments) -> None:
    """Measure requests one after the other."""
    run(arguments, at_once=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchBuildArguments:
    """Options of `trtllm-bench build`."""

    model: str = option("", "The model's name or directory.")
    model_path: str | None = option(None, "Directory of the model, if it is not --model.")
    workspace: str = option("/tmp", "Directory to write the engine below.", short="-w")
    max_seq_len: int | None = option(None, "Longest prompt plus output, in tokens.", low=1)
    max_batch_size: int | None = option(None, "Most sequences that the engine runs at once.", low=1)
    tp_size: int = option(1, "Ranks that divide each layer.", low=1)
    quantization: str | None = option(None, "Algorithm: FP8, NVFP4, W8A16, W4A16, ...", short="-q")
    dataset: str | None = option(None, "Accepted: limits are given by their own options.")


def build(arguments: BenchBuildArguments) -> None:
    model = arguments.model_path or arguments.model
    if not model:
        raise ConfigError("name the model: trtllm-bench --model M build")
    config = EngineConfig.from_options(
        model=model, tensor_parallel_size=arguments.tp_size, **QuantConfig(arguments.quantization).options()
    )
    output = Path(arguments.workspace) / Path(arguments.model or model).name / f"tp_{arguments.tp_size}_pp_1"
    limits = EngineLimits(max_batch_size=arguments.max_batch_size, max_seq_len=arguments.max_seq_len)
    build_engine(config, output, limits)
    print(f"engine: {output}")


THROUGHPUT = quire.cli.Command(run, BenchArguments, uses=frozenset(), foreign=lambda: MEASURING.foreign)
LATENCY = quire.cli.Command(run_alone, BenchArguments, uses=frozenset(), foreign=lambda: MEASURING.foreign)
BUILD = quire.cli.Command(build, BenchBuildArguments, uses=frozenset(), foreign=lambda: BUILDING.foreign)
PROGRAM = quire.cli.Program(
    "trtllm-bench",
    {
        "throughput": quire.cli.Entry(__name__, "Time many requests at once.", "THROUGHPUT"),
        "latency": quire.cli.Entry(__name__, "Time requests one after the other.", "LATENCY"),
        "build": quire.cli.Entry(__name__, "Build an engine to measure.", "BUILD"),
    },
)


def main(argv: list[str] | None = None) -> None:
    """Options may come before the command, as they do there."""
    words = list(sys.argv[1:] if argv is None else argv)
    place = next((i for i, word in enumerate(words) if word in PROGRAM.commands), None)
    quire.cli.main(words if place is None else [words[place], *words[:place], *words[place + 1 :]], PROGRAM)


if __name__ == "__main__":
    main()
