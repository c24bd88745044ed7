"""vLLM's flags that are no options here: which are accepted because they change no result, and which are refused.

The parser, `LLM(...)`, YAML files and docs/flags.md read this table; flags that are fields of `quire.config` or
`quire.serve.options` are only named, in SHARED.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Takes = Literal["value", "switch", "list"]


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """A flag by its option name (with underscores).

    `neutral` are the values that change nothing; None: all of them. Any other value is refused, and `nearest` says what
    to use in its place. `older` flags belong to earlier versions of vLLM. `dashes` in place of underscores.
    """

    name: str
    takes: Takes
    why: str
    neutral: tuple[str, ...] | None = None
    nearest: str = ""
    older: bool = False
    dashes: bool = True

    @property
    def flag(self) -> str:
        """As its engine spells it."""
        return "--" + (self.name.replace("_", "-") if self.dashes else self.name)

    def accepts(self, value: object) -> bool:
        """Whether the value changes no result here."""
        if self.neutral is None or value is None or (value is False and self.takes == "switch"):
            return True
        return str(value).lower() in self.neutral

    @property
    def fate(self) -> str:
        """For the docs."""
        if self.neutral is None:
            return "accepted"
        return f"accepted if {' or '.join(self.neutral)}" if self.neutral else "refused"


# Groups: (why, names). A name may end in "!" (a switch), "*" (takes a list).
ACCEPTED: tuple[tuple[str, str], ...] = (
    (
        "Kernels are compiled ahead, and no graph is captured or compiled at start",
        "enforce_eager! compilation_config cudagraph_capture_sizes* max_cudagraph_capture_size cudagraph_metrics! "
        "optimization_level performance_mode jit_monitor_mode jit_monitor_verbose! kernel_config ir_op_priority* "
        "enable_flashinfer_autotune!",
    ),
    (
        "Quire chooses its own kernels, and all give the same result",
        "attention_backend attention_config linear_backend moe_backend mamba_backend gdn_prefill_backend "
        "kda_prefill_backend kda_decode_backend sparse_indexer_topk_backend mamba_ssu_algorithm "
        "disable_cascade_attn! use_fp64_gumbel! disable_hybrid_kv_cache_manager!",
    ),
    (
        "Prompts are always computed in chunks beside decodes, within --max-num-batched-tokens",
        "enable_chunked_prefill! scheduler_reserve_full_isl! prefill_schedule_interval disable_chunked_mm_input! "
        "enable_batch_sharded_sampling! long_prefill_token_threshold_adaptive",
    ),
    (
        "It concerns several engines, or what their ranks do not do here",
        "cpu_distributed_timeout_seconds all2all_backend disable_nccl_for_dp_synchronization! headless! "
        "data_parallel_address data_parallel_backend data_parallel_rpc_port data_parallel_external_lb! "
        "data_parallel_hybrid_lb! data_parallel_multi_port_external_lb! data_parallel_supervisor_port "
        "dp_supervisor_probe_failure_threshold dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s "
        "dp_sync_interval dcp_comm_backend dcp_kv_cache_interleave_size dcp_q_replicate! "
        "cp_kv_cache_interleave_size enable_eplb! eplb_config expert_placement_strategy enable_ep_weight_filter! "
        "enable_elastic_ep! elastic_ep_max_dp_size enable_fault_tolerance! fault_tolerance_config enable_hc_sp! "
        "enable_nccl_comm_suspend! aggregate_engine_logging! ray_workers_use_nsight! "
        "enable_dbo! dbo_decode_token_threshold dbo_prefill_token_threshold ubatch_size "
        "enable_scale_out! fail_on_environ_validation!",
    ),
    (
        "Weights are mapped from the file and packed once, so there is nothing to offload or to prefetch",
        "cpu_offload_gb cpu_offload_params* offload_backend offload_group_size offload_num_in_group offload_params* "
        "offload_prefetch_step safetensors_load_strategy safetensors_prefetch_block_size "
        "safetensors_prefetch_num_threads max_parallel_loading_workers pt_load_map_location use_tqdm_on_load! "
        "model_loader_extra_config ignore_patterns* enable_cumem_allocator! sleep_mode_offload_cudagraph! "
        "sleep_preserve_parameter_names*",
    ),
    (
        "The models that run here take no images, audio or video",
        "allowed_local_media_path allowed_media_domains* enable_mm_embeds! interleave_mm_strings! "
        "language_model_only! limit_mm_per_prompt media_io_kwargs mm_device_do_normalize! mm_encoder_attn_backend "
        "mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin "
        "mm_encoder_fp8_scale_save_path mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb "
        "mm_processor_cache_gb mm_processor_cache_type mm_processor_device mm_processor_kwargs "
        "mm_shm_cache_max_object_size_mb mm_tensor_ipc skip_mm_profiling! trust_request_mm_kwargs! "
        "video_pruning_method video_pruning_rate enable_shm_tensor_arena! enable_flash_late_interaction!",
    ),
    (
        "No model that runs here keeps a recurrent state",
        "mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds mamba_ssm_cache_dtype "
        "enable_mamba_cache_stochastic_rounding! enable_mamba_shared_prefix_checkpoint! use_replayssm! "
        "replayssm_buffer_len",
    ),
    (
        "The prefix cache matches token by token, in a radix tree, without hashes",
        "prefix_caching_hash_algo prefix_match_unit prefix_cache_retention_interval kv_sharing_fast_prefill! "
        "swa_bounded_replay!",
    ),
    (
        "/metrics always has these figures, or they cost nothing here",
        "disable_log_stats! kv_cache_metrics! kv_cache_metrics_sample "
        "enable_server_load_tracking! "
        "enable_logging_iteration_details! enable_mfu_metrics! collect_detailed_traces* "
        "per_request_spec_decode_metrics! enable_layerwise_nvtx_tracing! log_error_stack! "
        "show_hidden_metrics_for_version",
    ),
    (
        "One API process serves all clients: its work leaves the engine's threads alone",
        "api_server_count renderer_num_workers",
    ),
    (
        "Code from a checkpoint never runs",
        "trust_remote_code! code_revision",
    ),
    (
        "Any of the grammar's back ends gives the same language",
        "reasoning_config tool_strict_level",
    ),
    (
        "A model that generates makes vectors too, whatever it is started for",
        "runner",
    ),
    (
        "The type of the files is detected",
        "config_format allow_deprecated_quantization!",
    ),
    (
        "The pages for developers never load anything from elsewhere",
        "enable_offline_docs!",
    ),
    (
        "It belongs to a cloud's own fingerprint of the system",
        "fingerprint_mode fingerprint_value",
    ),
    (
        "It tunes vLLM's kernels for adapters",
        "specialize_active_lora! enable_tower_connector_lora! "
        "enable_moe_shared_loras! enable_mixed_moe_lora_format! max_lora_cls_labels",
    ),
)

# Groups: (why, nearest, names). A name may give the values that change nothing: name=a,b.
REFUSED: tuple[tuple[str, str, str], ...] = (
    (
        "a server has one engine, whose ranks divide layers and runs of layers",
        "--tensor-parallel-size, --pipeline-parallel-size",
        "data_parallel_size=1 data_parallel_size_local=1 decode_context_parallel_size=1 "
        "prefill_context_parallel_size=1 data_parallel_rank=0 data_parallel_start_rank=0",
    ),
    (
        "an adapter changes all that its tensors name, and inputs are text",
        "an adapter without those tensors",
        "lora_target_modules* default_mm_loras",
    ),
    (
        "the KV cache stays in this process",
        "--kv-cache-memory-bytes",
        "kv_transfer_config kv_events_config "
        "kv_offloading_backend kv_offloading_size=0,0.0 ec_transfer_config ec_manager_config engram_config "
        "kv_cache_dtype_skip_layers*",
    ),
    ("memory is a share of what is free", "--gpu-memory-utilization", "device_memory_utilization"),
    ("the CPU is not chosen by number", "--threads, --numa-bind", "device_ids*"),
    ("requests hold token ids or text", "a prompt of token ids", "enable_prompt_embeds! tokens_only!"),
    ("only HTTP is spoken", "--port", "grpc! grpc_port"),
    ("nothing is sent to a collector", "/metrics, --enable-log-requests", "otlp_traces_endpoint"),
    (
        "classes of another engine cannot run in this one",
        "--logits-processors, --middleware",
        "scheduler_cls "
        "worker_cls=auto worker_extension_cls io_processor_plugin additional_config model_class_overrides "
        "aux_output_config",
    ),
    ("weights are read once from files", "/sleep and /wake_up around new files", "weight_transfer_config"),
    ("no tool runs inside the server", "tool calls that the client answers", "tool_server"),
    (
        "no output is marked or masked",
        "logprobs of a request",
        "watermark! watermark_config return_sampling_mask! "
        "enable_return_routed_experts! enable_trace_replay!",
    ),
    (
        "no such model runs here",
        "a text model",
        "diffusion_config mm_encoder_only! cohere_is_reasoning_model! cohere_format",
    ),
    ("requests choose it", "thinking in a request", "anthropic_disabled_thinking_effort"),
    ("the file that says how to quantize is the checkpoint's", "--quantization", "quantization_config"),
    ("the shape of the log is an option", "--log-format json, --log-config-file", "logging_config"),
    ("the bounds of histograms are fixed", "PromQL over the given bounds", "custom_histogram_buckets*"),
    ("the budget of a step is the one bound", "--max-num-batched-tokens", "max_num_scheduled_tokens"),
    ("running sequences are bounded by one number", "--max-num-seqs", "max_num_active_seqs"),
    ("a model's own head says what its vectors are", "--pooler-config", "convert=auto,none,embed"),
    ("the config lies in the model's directory", "--hf-overrides", "hf_config_path"),
)

# Flags of vLLM that are options here, by field name.
_SHARED = (
    "allow_credentials allowed_headers allowed_methods allowed_origins api_key async_scheduling block_size "
    "chat_template chat_template_content_format config default_chat_template_kwargs "
    "disable_access_log_for_endpoints disable_custom_all_reduce disable_fastapi_docs disable_sliding_window "
    "disable_uvicorn_access_log distributed_executor_backend distributed_timeout_seconds download_dir dtype "
    "enable_auto_tool_choice enable_expert_parallel enable_force_include_usage enable_log_deltas "
    "enable_log_outputs enable_log_requests enable_lora enable_per_request_metrics enable_prefix_caching "
    "enable_prompt_tokens_details enable_request_id_headers enable_sleep_mode enable_ssl_refresh "
    "enable_tokenizer_info_endpoint exclude_tools_when_tool_choice_none fully_sharded_loras generation_config "
    "gpu_memory_utilization h11_max_header_count h11_max_incomplete_event_size hf_overrides hf_token host "
    "kv_cache_dtype kv_cache_memory_bytes load_format log_config_file log_level logits_processors logprobs_mode "
    "long_prefill_token_threshold lora_dtype lora_modules master_addr master_port max_cpu_loras max_log_len "
    "max_logprobs max_lora_rank max_loras max_model_len max_num_batched_tokens max_num_queued_reqs "
    "max_num_queued_tokens max_num_seqs middleware model model_impl nnodes node_rank num_gpu_blocks_override "
    "numa_bind numa_bind_cpus numa_bind_nodes override_generation_config pipeline_parallel_size pooler_config "
    "port profiler_config quantization reasoning_parser reasoning_parser_plugin response_role "
    "return_tokens_as_token_ids revision root_path scheduling_policy seed served_model_name shutdown_timeout "
    "skip_tokenizer_init spec_method spec_model spec_tokens speculative_config sse_keep_alive_interval "
    "ssl_ca_certs ssl_cert_reqs ssl_certfile ssl_ciphers ssl_keyfile stream_interval structured_outputs_config "
    "tensor_parallel_size tokenizer tokenizer_mode tokenizer_revision tool_call_parser tool_parser_plugin "
    "trust_request_chat_template uds uvicorn_log_level"
)
SHARED = tuple(_SHARED.split())

# Flags of earlier versions, still found in launch lines.
OLDER_ACCEPTED = (
    ("Preempted sequences are computed again, never swapped", "swap_space preemption_mode"),
    ("There is one way to manage blocks", "use_v2_block_manager!"),
    ("Requests are logged only with --enable-log-requests", "disable_log_requests!"),
    (
        "There is one engine loop, ahead of the device if --async-scheduling is on",
        "num_scheduler_steps "
        "multi_step_stream_outputs! disable_async_output_proc! disable_frontend_multiprocessing!",
    ),
    (
        "llguidance compiles every constraint",
        "guided_decoding_backend guided_decoding_disable_fallback! guided_decoding_disable_any_whitespace!",
    ),
    ("No graph is captured", "max_seq_len_to_capture max_context_len_to_capture"),
    (
        "One process needs no workers",
        "worker_use_ray! engine_use_ray! scheduler_delay_factor",
    ),
    ("SGLang's endpoints are there whenever the package quire-compat is installed", "sglang_api!"),
    ("Reasoning is read if --reasoning-parser or the template names a format", "enable_reasoning!"),
)
OLDER_REFUSED = (
    ("the device is the CPU", "--backend", "device=auto,cpu"),
    ("Hugging Face archived TGI in 2026, and its endpoints were removed here", "/v1/completions", "tgi_api!"),
    ("the demonstration server of vLLM is no longer imitated", "/v1/completions", "vllm_demo_api!"),
    (
        "the kind of a model is read from its config",
        "--pooler-config",
        "task=auto,generate,embed,classify,score,reward,embedding",
    ),
)


def entries(names: str) -> Iterator[tuple[str, Takes, tuple[str, ...]]]:
    """The names in a group of a table, with what each takes and the values that change nothing."""
    for word in names.split():
        name, _, values = word.partition("=")
        takes: Takes = "switch" if name[-1] == "!" else "list" if name[-1] == "*" else "value"
        yield name.rstrip("!*"), takes, tuple(value for value in values.split(",") if value)


def foreign_table(
    accepted: Sequence[tuple[str, str]],
    refused: Sequence[tuple[str, str, str]],
    older: bool = False,
    dashes: bool = True,
) -> dict[str, ForeignFlag]:
    """A table from groups: (why, names) of options that change nothing, (why, nearest, names) of those that would."""
    found = [
        ForeignFlag(name, takes, why, older=older, dashes=dashes)
        for why, names in accepted
        for name, takes, _ in entries(names)
    ]
    found += [
        ForeignFlag(name, takes, why, neutral, nearest, older, dashes)
        for why, nearest, names in refused
        for name, takes, neutral in entries(names)
    ]
    return {flag.name: flag for flag in found}


FOREIGN = foreign_table(ACCEPTED, REFUSED) | foreign_table(OLDER_ACCEPTED, OLDER_REFUSED, older=True)
