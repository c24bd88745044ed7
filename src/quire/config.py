"""Engine options as frozen dataclasses. The CLI, its help and the docs are generated from these fields.

Each part of the engine receives only its own section; nothing reads configuration through a global.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from quire.devices.choices import DECIDED, LibraryChoice, read_limits
from quire.devices.registry import BackendName, Isa, choices_of, device_of_rank
from quire.errors import ConfigError, RequestError
from quire.lazy import Lazy
from quire.lora.options import LoraConfig
from quire.options import QUANTIZATIONS, json_object
from quire.options import check_options as check_options
from quire.options import option as option
from quire.params import SamplingParams
from quire.ranks.options import ParallelConfig
from quire.types import PoolerOptions, Pooling

if TYPE_CHECKING:
    from quire import spelling
else:
    spelling = Lazy("quire.spelling")

Dtype = Literal["auto", "float32", "float16", "bfloat16"]
# Beside what Quire makes of weights, the names of methods that a checkpoint may be quantized by (weights/schemes.py).
Quantization = Literal[
    "auto", "int8", "int8wo", "int4", "int4wo", "auto-round", "awq", "awq_marlin", "bitsandbytes", "compressed-tensors",
    "fbgemm_fp8", "fp8", "gguf", "gptq", "gptq_marlin", "hqq", "inc", "modelopt", "modelopt_fp4", "mxfp4", "mxfp8",
    "nvfp4", "quark", "squeezellm", "torchao",
]  # fmt: skip
KVDtype = Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8_e4m3", "fp8_e5m2"]
ModelImpl = Literal["auto", "quire", "transformers"]
SchedulingPolicy = Literal["fcfs", "priority"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
SpecMethod = Literal[
    "ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp", "medusa", "mlp_speculator", "dflash"
]

TokenizerMode = Literal["auto"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
_TOKENIZER_MODES = dict.fromkeys(("hf", "slow", "fast"), "auto")
_LOAD_FORMATS = dict.fromkeys(
    ("hf", "pt", "mmap", "npcache", "gguf", "fastsafetensors", "instanttensor", "runai_streamer"), "auto"
)


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
    tokenizer_mode: TokenizerMode = option(
        "auto", "The tokenizer is read from tokenizer.json or its older forms.", aliases=_TOKENIZER_MODES
    )
    tokenizer_revision: str | None = option(None, "Branch, tag or commit of --tokenizer on the hub.")
    skip_tokenizer_init: bool = option(False, "Load no tokenizer: prompts and outputs are token ids.")
    revision: str | None = option(None, "Branch, tag or commit of the model on the hub.")
    hf_token: str | None = option(None, "Token for gated models on the hub.")
    download_dir: str | None = option(None, "Directory for downloaded models.")
    load_format: LoadFormat = option(
        "auto",
        "auto, safetensors, or dummy: random weights from the config alone, to measure speed.",
        aliases=_LOAD_FORMATS,
    )
    hf_overrides: str | dict[str, Any] | None = option(
        None, "JSON that replaces keys of config.json, such as '{\"rope_theta\": 1e6}'."
    )
    rope_scaling: str | dict[str, Any] | None = option(
        None, 'JSON that replaces the rope scaling, such as \'{"rope_type": "yarn", "factor": 4.0}\'.'
    )
    rope_theta: float | None = option(None, "Base of the rotary embedding, in place of the config's.", low=1)
    dtype: Dtype = option(
        "auto",
        "Type of the weights in memory; auto takes the checkpoint's, or float32 if it has several.",
        common=True,
        aliases={"half": "float16", "float": "float32"},
    )
    quantization: Quantization = option(
        "auto",
        "Quantize weights: int8 or int4 (activations to int8 too), int8wo or int4wo (weights only), fp8, mxfp4 or "
        "nvfp4; auto keeps the checkpoint's own; awq, gptq and the like check that it is that one.",
        common=True,
        aliases=QUANTIZATIONS,
    )
    quantization_group_size: int = option(
        64, "Columns that share one int4 scale: 32, 64 or 128.", low=32, high=128
    )
    quantization_symmetric: bool = option(True, "int4 codes around zero, without zero points.")
    quantization_activations: Literal["auto", "int8", "float", "checkpoint"] = option(
        "auto",
        "Activations beside quantized weights: int8, float, checkpoint (rounded as its config says), or auto: int8 for "
        "GGUF files and W8A8, else float.",
    )
    quantization_pure: bool = option(False, "Hold the embedding and the head in int4 too, not in int8.")
    model_impl: ModelImpl = option(
        "auto",
        "quire (its own families), transformers (that library's code, slow), or auto: the first that works.",
    )
    architecture: str | None = option(
        None, "Load the model as this class or model_type (for example llama), whatever its config names."
    )
    pooler_config: str | dict[str, Any] | None = option(
        None, 'JSON that says how vectors are pooled, such as \'{"pooling_type": "MEAN"}\'.'
    )
    max_model_len: int | None = option(
        None,
        "Longest prompt plus output, in tokens; auto is the model's.",
        low=1,
        common=True,
        aliases={"auto": None, "-1": None},
    )
    disable_sliding_window: bool = option(False, "Limit --max-model-len to the sliding window.")
    chat_template: str | None = option(
        None, "File with a Jinja chat template, or the template itself.", common=True
    )
    generation_config: str = option(
        "auto", "Source of default sampling parameters: auto (the model's), vllm, or a directory."
    )
    override_generation_config: str | dict[str, Any] | None = option(
        None, "JSON of default sampling parameters, such as '{\"temperature\": 0.5}'."
    )
    max_logprobs: int = option(
        20, "Most log-probabilities per token that a request may ask for; -1 for all.", low=-1
    )
    logprobs_mode: LogprobsMode = option(
        "raw_logprobs",
        "Values reported as log-probabilities: before or after penalties, temperature and truncation.",
    )
    logits_processors: tuple[str, ...] = option(
        (), "Python class (module:Class) that changes logits before sampling; repeat for several."
    )

    def __post_init__(self) -> None:
        check_options(self)
        _ = self.config_changes, self.generation_changes, self.pooler

    @property
    def config_changes(self) -> dict[str, Any]:
        """Keys of config.json that options replace. ConfigError: they are no JSON or disagree."""
        changes = json_object("--hf-overrides", self.hf_overrides)
        scaling = json_object("--rope-scaling", self.rope_scaling)
        if scaling:
            changes = _joined(changes, "--rope-scaling", "rope_scaling", scaling)
        if self.rope_theta is not None:
            changes = _joined(changes, "--rope-theta", "rope_theta", self.rope_theta)
        return changes

    @property
    def generation_changes(self) -> dict[str, Any]:
        """Default sampling parameters that options give. ConfigError: one is unknown or wrong."""
        changes = json_object("--override-generation-config", self.override_generation_config)
        if "max_new_tokens" in changes:
            changes["max_tokens"] = changes.pop("max_new_tokens")
        try:
            SamplingParams(**changes)
        except (TypeError, RequestError) as error:
            raise ConfigError(f"--override-generation-config: {error}") from error
        return changes

    @property
    def pooling(self) -> Pooling | None:
        """How vectors are pooled, if options say so."""
        return self.pooler.pooling

    @property
    def pooler(self) -> PoolerOptions:
        """The keys of --pooler-config. ConfigError: a key or value is not supported."""
        return PoolerOptions.read(json_object("--pooler-config", self.pooler_config))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = option(16, "Tokens per KV block.", low=1, high=1024)
    kv_cache_dtype: KVDtype = option(
        "auto",
        "Type of the KV cache; auto is the checkpoint's; int8 has one scale per token and head.",
        common=True,
        aliases={"fp8": "fp8_e4m3", "half": "float16"},
    )
    gpu_memory_utilization: float = option(
        0.5, "Share of free memory for weights and KV cache.", low=0.01, high=1.0, common=True
    )
    kv_cache_memory_bytes: int | None = option(None, "KV cache size in bytes; overrides the share.", low=1)
    num_gpu_blocks_override: int | None = option(None, "KV cache size in blocks; overrides both.", low=1)
    enable_prefix_caching: bool = option(True, "Keep and reuse the KV of shared prefixes.")
    state_cache_fraction: float = option(
        0.25,
        "Share of the KV cache's memory for snapshots of recurrent states, from which prefixes go on; 0: none.",
        low=0.0,
        high=0.9,
    )

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
    scheduling_policy: SchedulingPolicy = option("fcfs", "Order of requests: fcfs, or priority, lower first.")
    stream_interval: int = option(1, "Tokens per update of a stream; the first comes at once.", low=1)
    async_scheduling: bool = option(
        False, "Schedule the next step while one is being computed; results are the same."
    )
    target_step_time: float | None = option(
        None,
        "Milliseconds that a step may take if it gives somebody a token; 0 sets no limit. "
        "The default is 100 for serve and 0 for everything else.",
        low=0.0,
        common=True,
    )
    max_num_partial_prefills: int = option(8, "Most prompts that are partly computed at once.", low=1)
    max_long_partial_prefills: int = option(4, "Most long prompts among them.", low=1)
    long_prefill_token_threshold: int = option(
        0, "Tokens above which a prompt is long; 0 takes 4% of the model's length.", low=0
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_long_partial_prefills > self.max_num_partial_prefills:
            raise ConfigError(
                f"--max-long-partial-prefills {self.max_long_partial_prefills} is more than "
                f"--max-num-partial-prefills {self.max_num_partial_prefills}: lower it"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """The hardware and how to use it."""

    backend: BackendName = option(
        "auto",
        "native (C++ kernels), torch (plain PyTorch) or reference (numpy, slow).",
        aliases={"vllm": "auto"},  # as vLLM's benchmarks name the engine
    )
    device: str = option("auto", "cpu, cuda, xpu, mps, interpreter, or auto: a GPU if usable.", common=True)
    batch_invariant: bool = option(True, "Others in a step change no bit; default is off for plain torch.")
    libraries: LibraryChoice = option("auto", "Others' products on a GPU: auto keeps our bits; none; all.")
    threads: int | None = option(
        None, "Compute threads; default is one per core this process may use.", low=1, high=1024, common=True
    )
    isa: Isa = option("auto", "Instruction set of the kernels; auto takes the fastest that the CPU has.")
    numa_bind: bool = option(False, "Run on the cores of one NUMA node.")
    numa_bind_nodes: tuple[str, ...] = option((), "The NUMA nodes to run on, or the node of each rank.")
    numa_bind_cpus: tuple[str, ...] = option((), "The cores to run on, such as 0-3,8.")
    enforce_eager: bool = option(False, "Launch a GPU's kernels one by one: capture no graphs of steps.")
    cudagraph_capture_sizes: tuple[str, ...] = option((), "Tokens of the steps that a GPU captures.")
    max_cudagraph_capture_size: int | None = option(None, "Most tokens of such a step.", low=0)
    compilation_config: str | int | dict[str, Any] | None = option(None, "vLLM's JSON: graphs or none.")
    machine_limits: str | None = option(
        None, "Limits beside which /metrics shows steps' work: measure, or GB/s,GFLOP/s such as 50,1000."
    )
    profiler_config: str | dict[str, Any] | None = option(
        None, 'JSON such as \'{"torch_profiler_dir": "DIR"}\': where /start_profile writes traces of steps.'
    )

    def __post_init__(self) -> None:
        check_options(self)
        _ = self.trace_directory, read_limits(self.machine_limits)

    def of_rank(self, rank: int, ranks: int, usable_threads: int) -> DeviceConfig:
        """Give a rank of this machine its share of the threads, its own GPU, and its node of those that are named."""
        if ranks == 1:
            return self
        threads, nodes = self.threads or usable_threads, self.numa_bind_nodes
        return replace(
            self,
            threads=max(1, threads // ranks),
            device=device_of_rank(self.device, self.backend, rank),
            numa_bind_nodes=(nodes[rank % len(nodes)],) if nodes else (),
        )

    @property
    def binds_cores(self) -> bool:
        """Return whether the process keeps to some cores."""
        return bool(self.numa_bind or self.numa_bind_nodes or self.numa_bind_cpus)

    @property
    def trace_directory(self) -> Path:
        """Where traces are written; by default the working directory."""
        keys = json_object("--profiler-config", self.profiler_config)
        return Path(str(keys.get("torch_profiler_dir") or ".")).expanduser()


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarConfig:
    """Structured output."""

    enable_jump_forward: bool = option(True, "Append forced tokens without a forward pass for each.")
    grammar_timeout: float = option(
        3.0, "Most seconds to compile a request's constraint.", low=0.01, high=600.0
    )
    grammar_memory_mib: int = option(2048, "Memory limit of the process that tries constraints out.", low=256)
    structured_outputs_config: str | dict[str, Any] | None = option(
        None, "JSON with vLLM's keys; its back ends give the same language, so none changes anything."
    )

    def __post_init__(self) -> None:
        check_options(self)
        for key, value in json_object("--structured-outputs-config", self.structured_outputs_config).items():
            harmless = key in ("backend", "disable_fallback", "reasoning_parser", "reasoning_parser_plugin")
            if not harmless and (value if key != "disable_any_whitespace" else value is False):
                raise ConfigError(
                    f"--structured-outputs-config: {key} = {value} is not supported: set it in structured_outputs of "
                    "a request"
                )


class SpeculativeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of `speculative_config`; their names are vLLM's.

    `num_speculative_tokens` is the most that one sequence drafts in a step (None: the method's default). With
    `adaptive` false it always drafts that many. `draft_sample_method`: drafts of a model are its likeliest tokens
    (greedy), or drawn with the target's own noise (probabilistic). The last block changes nothing.
    """

    method: SpecMethod | None = None
    model: str | None = None
    revision: str | None = None
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=256)] | None = None
    adaptive: bool = True
    quantization: Quantization = "auto"
    max_model_len: Annotated[int, Meta(ge=1)] | None = None
    prompt_lookup_min: Annotated[int, Meta(ge=1)] | None = None
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=1024)] | None = None
    suffix_decoding_max_tree_depth: Annotated[int, Meta(ge=2, le=256)] = 24
    suffix_decoding_max_cached_requests: Annotated[int, Meta(ge=0)] = 10000
    suffix_decoding_max_spec_factor: Annotated[float, Meta(ge=0.0)] = 1.0
    suffix_decoding_max_spec_offset: float = 0.0
    suffix_decoding_min_token_prob: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.1
    draft_sample_method: Literal["greedy", "probabilistic"] = "probabilistic"
    rejection_sample_method: Literal["standard"] = "standard"

    draft_tensor_parallel_size: Literal[1] | None = None
    code_revision: str | None = None
    enforce_eager: bool | None = None
    attention_backend: str | None = None
    moe_backend: str | None = None
    disable_padded_drafter_batch: bool = False
    use_local_argmax_reduction: bool = False

    @property
    def lookup_range(self) -> tuple[int, int]:
        """The shortest and the longest n-gram that prompt lookup searches for."""
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        return (low or high or 5), (high or low or 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Speculative decoding. The output is the same with and without it."""

    speculative_config: str | dict[str, Any] | None = option(
        None,
        'JSON with vLLM\'s keys, such as \'{"method": "ngram", "num_speculative_tokens": 5}\'.',
    )
    spec_method: str | None = option(None, f"How to draft: {', '.join(get_args(SpecMethod))}.")
    spec_model: str | None = option(None, "Draft model or head: directory or Hugging Face id.")
    spec_tokens: int | None = option(None, "Most tokens to draft per sequence and step.", low=1, high=256)
    speculative_model: str | None = option(None, "Older name of --spec-model; [ngram] means prompt lookup.")
    num_speculative_tokens: int | None = option(None, "Older name of --spec-tokens.", low=1, high=256)

    def __post_init__(self) -> None:
        check_options(self)
        _ = self.options

    @property
    def options(self) -> SpeculativeOptions | None:
        """What all the options ask for together; None: no speculation. ConfigError: they are wrong or disagree."""
        given = json_object("--speculative-config", self.speculative_config)
        for name in TREE_OPTIONS & given.keys():
            raise ConfigError(
                f"--speculative-config: {name} is gone, because drafts are chains: leave it out"
            )
        model = self.speculative_model
        if model == "[ngram]":
            given, model = _joined(given, "--speculative-model", "method", "ngram"), None
        for flag, key, value in (
            ("--spec-method", "method", self.spec_method),
            ("--spec-model", "model", self.spec_model),
            ("--spec-tokens", "num_speculative_tokens", self.spec_tokens),
            ("--speculative-model", "model", model),
            ("--num-speculative-tokens", "num_speculative_tokens", self.num_speculative_tokens),
        ):
            if value is not None:
                given = _joined(given, flag, key, value)
        if not given:
            return None
        if str(given.get("method")).endswith("_mtp"):  # vLLM's deprecated names of the method
            given["method"] = "mtp"
        try:
            found = msgspec.convert(given, SpeculativeOptions)
        except msgspec.ValidationError as error:
            raise ConfigError(f"--speculative-config: {error}") from error
        _check_speculation(found)
        return found


# Older options of Quire.
TREE_OPTIONS = frozenset({"tree_top_k", "tree_tokens"})


def _settled(aliases: Mapping[str, Any], value: Any) -> Any:
    """A value by its own name here; a list as a tuple."""
    if isinstance(value, list):
        return tuple(value)
    return aliases.get(str(value), value) if isinstance(value, (str, int)) else value


def _joined(given: dict[str, Any], flag: str, key: str, value: Any) -> dict[str, Any]:
    if given.get(key, value) != value:
        raise ConfigError(f"{flag} {value} contradicts {key} = {given[key]}: give one of them")
    return {**given, key: value}


def _check_speculation(options: SpeculativeOptions) -> None:
    low, high = options.lookup_range
    if low > high:
        raise ConfigError(
            f"--speculative-config: prompt_lookup_min {low} is more than prompt_lookup_max {high}: lower it"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an engine needs, in sections."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    grammar: GrammarConfig = field(default_factory=GrammarConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    seed: int | None = option(
        None, "Source of seeds for requests without one; 0, or chance for a server.", low=0
    )

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Sort flat options (`block_size=32, dtype="bfloat16", ...`) into sections; unknown names are errors."""
        choices = choices_of(options.get("device", "auto"), options.get("backend", "auto"))
        options |= {name: getattr(choices, name) for name in DECIDED if options.get(name) is None}
        taken: dict[str, Any] = {"seed": options.pop("seed", None)}
        for name, section in SECTIONS.items():
            known = {f.name: f.metadata["aliases"] or {} for f in fields(section)}
            given = {k: options.pop(k) for k in list(options) if k in known}
            taken[name] = section(**{k: _settled(known[k], value) for k, value in given.items()})
        if options:
            names = {f.name for section in SECTIONS.values() for f in fields(section)}
            named = [f"{name}{spelling.nearest(name, names)}" for name in sorted(options)]
            raise ConfigError(f"unknown option: {', '.join(named)}")
        check_options(made := cls(**taken))
        return made


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "device": DeviceConfig,
    "parallel": ParallelConfig,
    "grammar": GrammarConfig,
    "speculation": SpeculationConfig,
    "lora": LoraConfig,
}
