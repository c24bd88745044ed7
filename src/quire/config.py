"""Engine options as frozen dataclasses. The CLI, its help and the docs are generated from these fields.

Each part of the engine receives only its own section; nothing reads configuration through a global.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_type_hints

from quire.devices.registry import BackendName, Isa
from quire.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16"]
Quantization = Literal["auto", "int8", "int8wo", "int4", "int4wo"]
KVDtype = Literal["auto", "float32", "bfloat16", "int8"]
ModelImpl = Literal["auto", "quire", "transformers"]
SchedulingPolicy = Literal["fcfs", "priority"]


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    short: str | None = None,
    common: bool = False,
) -> Any:
    """A dataclass field with its help text, numeric range (inclusive) and one-letter flag.

    `--help` shows only common fields. If a command marks none of its own as common, it shows all of its own.
    """
    metadata = {"help": help, "low": low, "high": high, "short": short, "common": common}
    return field(default=default, metadata=metadata)


def check_options(config: object) -> None:
    """Raise ConfigError if a field is out of its range or not one of its choices."""
    hints = get_type_hints(type(config))
    for f in fields(config):  # type: ignore[arg-type]
        value, flag = getattr(config, f.name), f.name.replace("_", "-")
        choices = get_args(hints[f.name]) if getattr(hints[f.name], "__origin__", None) is Literal else ()
        if choices and value not in choices:
            raise ConfigError(f"--{flag} must be one of {', '.join(map(str, choices))}, got {value!r}")
        if value is None or isinstance(value, (bool, str)):
            continue
        low, high = f.metadata.get("low"), f.metadata.get("high")
        if low is not None and value < low:
            raise ConfigError(f"--{flag} must be at least {low}, got {value}")
        if high is not None and value > high:
            raise ConfigError(f"--{flag} must be at most {high}, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model to run, and how to hold its weights and numbers."""

    model: str = option(
        "",
        "Local directory, GGUF file or Hugging Face id; default is the model inside the package.",
        common=True,
    )
    tokenizer: str | None = option(
        None, "Directory, GGUF file or id of the tokenizer, if it is not the model's own."
    )
    revision: str | None = option(None, "Branch, tag or commit of the model on the hub.")
    download_dir: str | None = option(None, "Directory for downloaded models.")
    dtype: Dtype = option("auto", "Type of the weights in memory; auto takes the checkpoint's.", common=True)
    quantization: Quantization = option(
        "auto",
        "Quantize weights: int8 or int4 (activations to int8 too), int8wo or int4wo (weights only); "
        "auto keeps the checkpoint's own.",
        common=True,
    )
    quantization_group_size: int = option(
        64, "Columns that share one int4 scale: 32, 64 or 128.", low=32, high=128
    )
    quantization_symmetric: bool = option(True, "int4 codes around zero, without zero points.")
    quantization_pure: bool = option(False, "Hold the embedding and the head in int4 too, not in int8.")
    model_impl: ModelImpl = option(
        "auto",
        "quire (its own families), transformers (that library's code, slow), or auto: the first that works.",
    )
    max_model_len: int | None = option(None, "Longest prompt plus output, in tokens.", low=1, common=True)
    chat_template: str | None = option(
        None, "File with a Jinja chat template, or the template itself.", common=True
    )
    generation_config: str = option(
        "auto", "Source of default sampling parameters: auto (the model's), vllm, or a directory."
    )
    max_logprobs: int = option(
        20, "Most log-probabilities per token that a request may ask for; -1 for all.", low=-1
    )
    trust_remote_code: bool = option(False, "Refused: Quire never runs code from a checkpoint.")

    def __post_init__(self) -> None:
        check_options(self)
        if self.trust_remote_code:
            raise ConfigError("--trust-remote-code is refused: Quire never runs code that comes with a model")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = option(16, "Tokens per KV block.", low=1, high=1024)
    kv_cache_dtype: KVDtype = option(
        "auto",
        "Type of the KV cache; auto is the checkpoint's; int8 has one scale per token and head.",
        common=True,
    )
    gpu_memory_utilization: float = option(
        0.5, "Share of free memory for weights and KV cache.", low=0.01, high=1.0, common=True
    )
    kv_cache_memory_bytes: int | None = option(None, "KV cache size in bytes; overrides the share.", low=1)
    num_gpu_blocks_override: int | None = option(None, "KV cache size in blocks; overrides both.", low=1)
    enable_prefix_caching: bool = option(True, "Keep and reuse the KV of shared prefixes.")

    def __post_init__(self) -> None:
        check_options(self)
        if self.kv_cache_dtype == "int8" and self.block_size % 4:
            raise ConfigError(
                f"--kv-cache-dtype int8 needs a --block-size that is a multiple of 4, got {self.block_size}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How requests share each step."""

    max_num_seqs: int = option(256, "Most sequences that run at once.", low=1, high=65536, common=True)
    max_num_batched_tokens: int = option(1024, "Most tokens computed in one step.", low=1)
    scheduling_policy: SchedulingPolicy = option(
        "fcfs", "Order of waiting requests: fcfs, or priority (lower first)."
    )
    async_scheduling: bool = option(
        False, "Schedule the next step while one is being computed; results are the same."
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """The hardware and how to use it."""

    backend: BackendName = option(
        "auto", "native (C++ kernels), torch (plain PyTorch, slow) or reference (numpy, slower)."
    )
    threads: int | None = option(
        None, "Compute threads; default is one per core this process may use.", low=1, high=1024, common=True
    )
    isa: Isa = option("auto", "Instruction set of the kernels; auto takes the fastest that the CPU has.")

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarConfig:
    """Structured output."""

    enable_jump_forward: bool = option(True, "Append forced tokens without a forward pass for each.")
    grammar_timeout: float = option(
        3.0, "Most seconds to compile a request's constraint.", low=0.01, high=600.0
    )
    grammar_memory_mib: int = option(2048, "Memory limit of the process that tries constraints out.", low=256)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an engine needs, in sections."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    grammar: GrammarConfig = field(default_factory=GrammarConfig)
    seed: int = option(0, "Source of seeds for requests without one.", low=0)

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Sort flat options (`block_size=32, dtype="bfloat16", ...`) into sections; unknown names are errors."""
        taken: dict[str, Any] = {}
        if "seed" in options:
            taken["seed"] = int(options.pop("seed") or 0)
        for name, section in SECTIONS.items():
            names = {f.name for f in fields(section)}
            taken[name] = section(**{k: options.pop(k) for k in list(options) if k in names})
        if options:
            raise ConfigError(f"unknown option: {', '.join(sorted(options))}")
        return cls(**taken)


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "device": DeviceConfig,
    "grammar": GrammarConfig,
}
