"""SGLang's options: the option of Quire that each is, and those that change nothing or are refused.

Its launch lines and the arguments of its `Engine` are read by this table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import make_dataclass
from typing import Any

from quire.errors import ConfigError
from quire.flags.arguments import FlexibleArgumentParser
from quire.flags.table import foreign_table, take_flags

# Options of the same meaning, by SGLang's name.
SAME = {
    "model_path": "model",
    "model": "model",
    "tokenizer_path": "tokenizer",
    "tokenizer_mode": "tokenizer_mode",
    "load_format": "load_format",
    "revision": "revision",
    "download_dir": "download_dir",
    "context_length": "max_model_len",
    "json_model_override_args": "hf_overrides",
    "dtype": "dtype",
    "quantization": "quantization",
    "kv_cache_dtype": "kv_cache_dtype",
    "mem_fraction_static": "gpu_memory_utilization",
    "max_running_requests": "max_num_seqs",
    "max_queued_requests": "max_num_queued_reqs",
    "page_size": "block_size",
    "stream_interval": "stream_interval",
    "random_seed": "seed",
    "tp_size": "tensor_parallel_size",
    "tensor_parallel_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "chat_template": "chat_template",
    "reasoning_parser": "reasoning_parser",
    "tool_call_parser": "tool_call_parser",
    "served_model_name": "served_model_name",
    "api_key": "api_key",
    "host": "host",
    "port": "port",
    "ssl_keyfile": "ssl_keyfile",
    "ssl_certfile": "ssl_certfile",
    "ssl_ca_certs": "ssl_ca_certs",
    "fastapi_root_path": "root_path",
    "log_level": "log_level",
    "max_lora_rank": "max_lora_rank",
    "max_loras_per_batch": "max_loras",
    "max_loaded_loras": "max_cpu_loras",
    "speculative_draft_model_path": "spec_model",
    "speculative_draft_model": "spec_model",
    "speculative_num_draft_tokens": "spec_tokens",
    "cuda_graph_max_bs": "max_cudagraph_capture_size",
    "threads": "threads",
    "device": "device",
}
SWITCHES = {
    "skip_tokenizer_init": "skip_tokenizer_init",
    "enable_lora": "enable_lora",
    "enable_cache_report": "enable_prompt_tokens_details",
    "enable_ssl_refresh": "enable_ssl_refresh",
    "log_requests": "enable_log_requests",
    "disable_cuda_graph": "enforce_eager",
}
_INTEGERS = (
    "context_length max_running_requests max_queued_requests page_size stream_interval random_seed tp_size "
    "tensor_parallel_size pp_size pipeline_parallel_size port max_lora_rank max_loras_per_batch max_loaded_loras "
    "speculative_num_draft_tokens threads "
    "chunked_prefill_size max_total_tokens cuda_graph_max_bs"
)
_METHODS = {
    "eagle": "eagle",
    "eagle3": "eagle3",
    "nextn": "mtp",
    "ngram": "ngram",
    "standalone": "draft_model",
    "dflash": "dflash",
}
_SHORT = {"tp": "tp_size", "tp_size": "tp_size", "dp": "dp_size", "pp": "pp_size", "ep": "ep_size"}

_ACCEPTED: tuple[tuple[str, str], ...] = (
    ("Code from a checkpoint never runs", "trust_remote_code!"),
    (
        "Kernels are compiled as they are, and steps of --cuda-graph-bs are captured whole",
        "disable_cuda_graph_padding! enable_torch_compile! torch_compile_max_bs "
        "enable_profile_cuda_graph! disable_piecewise_cuda_graph! skip_server_warmup!",
    ),
    (
        "Quire has kernels of its own for each device, and chooses among them",
        "attention_backend prefill_attention_backend decode_attention_backend sampling_backend moe_runner_backend "
        "fp8_gemm_backend triton_attention_num_kv_splits enable_deterministic_inference! "
        "disable_custom_all_reduce! enable_nccl_nvls! enable_triton_kernel_moe!",
    ),
    (
        "Any of the grammar's back ends gives the same language",
        "grammar_backend",
    ),
    (
        "The order of waiting requests changes none of them",
        "schedule_policy schedule_conservativeness radix_eviction_policy",
    ),
    (
        "Prompts are always computed in chunks beside decodes",
        "max_prefill_tokens enable_mixed_chunk! prefill_max_requests enable_dynamic_chunking!",
    ),
    (
        "/metrics is always there",
        "enable_metrics! enable_metrics_for_all_schedulers! decode_log_interval collect_tokens_histogram!",
    ),
    ("A model that generates makes vectors too", "is_embedding! disable_fast_image_processor!"),
    ("The engine is watched, and started again if it fails", "watchdog_timeout dist_timeout"),
    ("One API process serves all clients", "tokenizer_worker_num detokenizer_worker_num stream_output!"),
    (
        "Weights are packed once, in the device's own memory",
        "weight_loader_disable_mmap! cpu_offload_gb model_loader_extra_config",
    ),
    (
        "It concerns several machines or GPUs",
        "dist_init_addr nccl_port gpu_id_step moe_a2a_backend load_balance_method enable_dp_attention!",
    ),
    (
        "Steps overlap only with --async-scheduling of Quire",
        "disable_overlap_schedule! num_continuous_decode_steps",
    ),
    ("Logs of requests have no levels", "log_requests_level log_requests_format show_time_cost!"),
    (
        "Drafts of every method leave the output as it is",
        "speculative_accept_threshold_single speculative_accept_threshold_acc speculative_attention_mode",
    ),
    (
        "Snapshots of recurrent states are taken where prompts part and end",
        "mamba_scheduler_strategy mamba_track_interval",
    ),
    ("Drafts are chains, which give the same output as trees", "speculative_eagle_topk"),
)
_REFUSED: tuple[tuple[str, str, str], ...] = (
    (
        "this line starts one engine; `quire serve MODEL --data-parallel-size N` starts N behind one address",
        "quire serve --data-parallel-size",
        "dp_size=1 data_parallel_size=1",
    ),
    (
        "this line starts one engine on this machine; `quire serve` has --master-addr for others",
        "--tp-size, --pp-size",
        "ep_size=1 nnodes=1 node_rank=0 expert_parallel_size=1",
    ),
    (
        "the KV cache stays in this process",
        "--max-total-tokens",
        "enable_hierarchical_cache! disaggregation_mode=null",
    ),
    (
        "recurrent states are float32, and rows for them are a share of memory",
        "float32, --mamba-full-memory-ratio",
        "mamba_ssm_dtype=float32 max_mamba_cache_size",
    ),
    ("classes in requests never run", "custom_params of a request", "enable_custom_logit_processor!"),
    (
        "white space is chosen by each request",
        "whitespace_pattern of structured_outputs",
        "constrained_json_whitespace_pattern",
    ),
    ("torchao changes no weights here", "--quantization", "torchao_config="),
    ("models that run here take text", "a text model", "enable_multimodal!"),
    ("the chat template is a file, or the model's own", "--chat-template", "completion_template"),
)


FOREIGN = foreign_table(_ACCEPTED, _REFUSED)


def _cut(value: Any) -> dict[str, Any]:
    """chunked_prefill_size: -1 computes prompts whole, as far as they fit into a step."""
    return {} if int(value) < 0 else {"max_num_batched_tokens": int(value)}


def _method(value: str) -> dict[str, Any]:
    if value.lower() not in _METHODS:
        known = ", ".join(name.upper() for name in _METHODS)
        raise ConfigError(f"--speculative-algorithm {value} is not supported: take {known}")
    return {"spec_method": _METHODS[value.lower()]}


def _adapters(value: Any) -> dict[str, Any]:
    """lora_paths: NAME=PATH or PATH, or a map from name to path."""
    items = [f"{name}={path}" for name, path in value.items()] if isinstance(value, Mapping) else value
    named = [str(item) if "=" in str(item) else f"{item}={item}" for item in items]
    return {"enable_lora": True, "lora_modules": named}


# Options that are others here: what they are, and how their values become Quire's.
MADE: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "chunked_prefill_size": ("--max-num-batched-tokens", _cut),
    "speculative_algorithm": ("--spec-method", _method),
    "speculative_algo": ("--spec-method", _method),
    "mamba_full_memory_ratio": (
        "--state-cache-fraction",
        lambda value: {"state_cache_fraction": float(value) / (1 + float(value))},
    ),
    "lora_paths": ("--enable-lora --lora-modules", _adapters),
    "cuda_graph_bs": (
        "--cudagraph-capture-sizes",
        lambda value: {"cudagraph_capture_sizes": tuple(map(str, value))},
    ),
    "disable_radix_cache": ("--no-enable-prefix-caching", lambda value: {"enable_prefix_caching": not value}),
    "enable_priority_scheduling": (
        "--scheduling-policy priority",
        lambda value: {"scheduling_policy": "priority" if value else "fcfs"},
    ),
    "speculative_num_steps": ("--spec-tokens", lambda value: {"steps": int(value)}),
    "base_gpu_id": ("--device cuda:N", lambda value: {"first_gpu": int(value)}),
    "max_total_tokens": ("--num-gpu-blocks-override, in tokens", lambda value: {"total_tokens": int(value)}),
}
_MADE_SWITCHES = ("disable_radix_cache", "enable_priority_scheduling")
NAMES = tuple(sorted({*SAME, *SWITCHES, *MADE, *FOREIGN}))


def meaning(name: str) -> str:
    """Name the option of Quire for one of SGLang's."""
    if name in MADE:
        return MADE[name][0]
    return f"--{(SAME.get(name) or SWITCHES[name]).replace('_', '-')}"


def read_options(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Quire's options for SGLang's, None being unset, and a line about each that changes nothing.

    Raises ConfigError for one that is unknown or would change a result.
    """
    found: dict[str, Any] = {}
    options = {name: value for name, value in given.items() if value is not None}
    notices = take_flags(options, FOREIGN)
    for name, value in options.items():
        if name in MADE:
            found |= MADE[name][1](value)
        elif name in SAME or name in SWITCHES:
            found[SAME.get(name) or SWITCHES[name]] = value
        else:
            raise ConfigError(f"--{name.replace('_', '-')} is neither an option of SGLang nor of Quire")
    return _settled(found, notices), notices


def _settled(found: dict[str, Any], notices: list[str]) -> dict[str, Any]:
    """Options that several of SGLang's make together; a cache that is smaller than the context lowers its limit."""
    tokens, steps, gpu = (found.pop(name, None) for name in ("total_tokens", "steps", "first_gpu"))
    if gpu and found.get("device", "cuda") == "cuda":
        found["device"] = f"cuda:{gpu}"
    if tokens is not None:
        size = int(found.setdefault("block_size", 16))  # a GPU's own differs
        found["num_gpu_blocks_override"] = max(1, tokens // size)
        longest, room = found.get("max_model_len"), found["num_gpu_blocks_override"] * size
        if isinstance(longest, int) and longest > room:
            found["max_model_len"] = room
            notices.append(
                f"--context-length {longest} is lowered to the {room} tokens of --max-total-tokens"
            )
    if steps is not None:
        found["spec_tokens"] = steps
    if "log_level" in found:
        found.setdefault("uvicorn_log_level", found["log_level"])
    for name in ("served_model_name", "api_key"):
        if isinstance(found.get(name), str):
            found[name] = (found[name],)
    return found


def add_flags(made: argparse.ArgumentParser) -> None:
    """Add SGLang's flags that the parser lacks; what it reads is for `read_options`."""
    for name in NAMES:
        short = [f"--{short}" for short, long in _SHORT.items() if long == name]
        foreign = FOREIGN.get(name)
        settings: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
        if name in SWITCHES or name in _MADE_SWITCHES or (foreign is not None and foreign.takes == "switch"):
            settings["action"] = "store_true"
        elif name in ("lora_paths", "cuda_graph_bs") or (foreign is not None and foreign.takes == "list"):
            settings["nargs"] = "*"
        else:
            settings["type"] = (
                int if name in _INTEGERS.split() else float if name == "mem_fraction_static" else str
            )
        settings["help"] = argparse.SUPPRESS if name in FOREIGN else f"{meaning(name)} of quire serve"
        flags = dict.fromkeys([f"--{name.replace('_', '-')}", *short])
        if missing := [flag for flag in flags if flag not in made._option_string_actions]:
            made.add_argument(*missing, **settings)


def parsed(prog: str, argv: Sequence[str]) -> dict[str, Any]:
    """SGLang's options in a launch line."""
    made = FlexibleArgumentParser(prog, allow_abbrev=False)
    add_flags(made)
    return vars(made.parse_args(list(argv)))


def _from_cli_args(kind: type[Any], args: argparse.Namespace) -> Any:
    """Take the options that a parser has read, and leave its other arguments alone."""
    return kind(**{name: value for name, value in vars(args).items() if name in NAMES})


ServerArgs = make_dataclass(
    "ServerArgs",
    [(name, Any, None) for name in NAMES],
    namespace={
        "__doc__": "SGLang's options by name, None being unset: for `Engine(**dataclasses.asdict(args))`.",
        "add_cli_args": staticmethod(add_flags),
        "from_cli_args": classmethod(_from_cli_args),
    },
)
