"""TensorRT-LLM's options: their names in Quire, those that mean nothing here, and those that are refused."""

from functools import partial

from quire.flags.table import foreign_table
from quire_compat.dialect import Dialect

_table = partial(foreign_table, dashes=False)

_KERNELS = "Quire has its own kernels for each machine, and all give the same result"
_ADAPTERS = "adapters are chosen when the engine serves: --enable-lora, --max-lora-rank"
_BATCHES = "batches hold no padding, and the KV cache is paged"
_FILES = "the files of a model say it"

# Plugins and features of kernels: options of builds, and fields of PluginConfig.
PLUGINS = _table(
    (
        (
            _KERNELS,
            "bert_attention_plugin gpt_attention_plugin gemm_plugin gemm_swiglu_plugin fp8_rowwise_gemm_plugin "
            "qserve_gemm_plugin identity_plugin layernorm_quantization_plugin rmsnorm_quantization_plugin nccl_plugin "
            "lookup_plugin moe_plugin mamba_conv1d_plugin low_latency_gemm_plugin low_latency_gemm_swiglu_plugin "
            "gemm_allreduce_plugin smooth_quant_gemm_plugin weight_only_groupwise_quant_matmul_plugin "
            "weight_only_quant_matmul_plugin smooth_quant_plugins quantize_per_token_plugin quantize_tensor_plugin "
            "context_fmha context_fmha_fp32_acc use_custom_all_reduce multi_block_mode enable_xqa "
            "attention_qk_half_accumulation bert_context_fmha_fp32_acc use_paged_context_fmha "
            "use_context_fmha_for_generation multiple_profiles paged_state norm_quant_fusion reduce_fusion "
            "user_buffer use_fused_mlp pp_reduce_scatter",
        ),
        (_BATCHES, "paged_kv_cache remove_input_padding manage_weights"),
        ("the size of a block is chosen when the engine serves: --block-size", "tokens_per_block"),
        (_ADAPTERS, "lora_plugin dora_plugin"),
    ),
    (
        ("attention sees what the model says", "a model with a sliding window", "streamingllm=disable,false"),
        (
            "attention is computed in the type of the KV cache",
            "--kv_cache_dtype of trtllm-serve",
            "use_fp8_context_fmha=disable,false",
        ),
    ),
)

# Of a build: BuildConfig, Builder.create_builder_config, trtllm-build.
BUILD = _table(
    (
        (
            "the tokens of a step are bounded when the engine serves: --max-num-batched-tokens",
            "max_num_tokens opt_num_tokens",
        ),
        ("no batch size is preferred, up to max_batch_size", "opt_batch_size"),
        (_ADAPTERS, "max_lora_rank lora_dir* lora_target_modules* lora_ckpt_source lora_config"),
        ("any width runs, within max_batch_size", "max_beam_width"),
        ("Quire plans its workspace ahead: `quire plan` shows it", "workspace max_workspace_size"),
        (
            "Nothing is measured during a build",
            "timing_cache input_timing_cache output_timing_cache fast_build!",
        ),
        ("Nothing is measured during a build", "force_num_profiles builder_opt"),
        (
            "`quire inspect` shows what an engine holds",
            "profiling_verbosity enable_debug_output! monitor_memory!",
        ),
        ("the type of each product follows from precision", "strongly_typed! precision_constraints"),
        ("a changed checkpoint is built again, in seconds", "use_refit! refit!"),
        ("an engine holds its weights, and maps them", "use_strip_plan! strip_plan! weight_streaming!"),
        ("zeros are multiplied like other weights", "weight_sparsity!"),
        ("ranks are built one after the other", "workers parallel_build!"),
        ("logits are float32", "logits_dtype"),
        ("decoders have no encoder", "max_encoder_input_len"),
        ("all ranks are on one machine", "gpus_per_node cluster_key auto_parallel_config"),
        ("Quire logs through Python's logging", "log_level"),
        (
            _FILES,
            "name num_layers num_heads num_kv_heads hidden_size vocab_size hidden_act max_position_embeddings",
        ),
        (_FILES, "use_mrope!"),
    ),
    (
        (
            "requests ask for log-probabilities",
            "logprobs and prompt_logprobs of SamplingParams",
            "gather_context_logits!=0,false gather_generation_logits!=0,false gather_all_token_logits!",
        ),
        ("prompts are tokens alone", "an adapter", "max_prompt_embedding_table_size=0"),
        ("an output is bounded with its prompt", "max_seq_len", "max_output_len"),
        ("types follow from precision", "precision, or a quantized checkpoint", "quant_mode=0"),
        (
            "drafting is chosen when the engine serves",
            "speculative_config of LLM",
            "speculative_decoding_mode=none",
        ),
        ("drafting is chosen when the engine serves", "speculative_config of LLM", "max_draft_len=0"),
        ("generation needs the KV cache", "paged", "kv_cache_type=paged,continuous,kvcachetype.paged"),
        ("nothing is written but the engine", "`quire inspect`", "visualize_network=false"),
        ("a build without an engine checks nothing more", "`quire plan`", "dry_run!"),
        (
            "layers are divided by the checkpoint's own ranks",
            "convert_checkpoint.py --tp_size",
            "auto_parallel=1",
        ),
        ("code from a file never runs", "a network of tensorrt_llm.layers", "model_cls_file model_cls_name"),
        ("the checkpoint has the config beside it", "--checkpoint_dir", "model_config"),
    ),
)
BUILDING = Dialect(foreign={**PLUGINS, **BUILD})

CONVERSION = _table(
    (
        (_KERNELS, "disable_weight_only_quant_plugin! per_channel! per_token! per_group!"),
        (
            "the embedding is whole on each rank, and a tied head is stored once",
            "use_parallel_embedding! embedding_sharding_dim use_embedding_sharing! share_embedding_table!",
        ),
        ("weights are mapped and written one by one", "load_by_shard! load_model_on_cpu! workers"),
        (
            "experts are divided like MLPs, unless --enable-expert-parallel is given",
            "moe_tp_size moe_ep_size moe_renorm_mode",
        ),
        ("nothing is calibrated by a conversion", "calib_dataset calib_size calib_max_seq_length"),
        ("int4 has groups of 64 columns", "group_size"),
        ("Quire logs through Python's logging", "log_level"),
    ),
    (
        ("an engine's stages are chosen when it serves", "--pp_size of trtllm-serve", "pp_size=1 cp_size=1"),
        ("that is the work of a calibration", "quantize.py --qformat int8_sq", "smoothquant"),
        (
            "the type of the KV cache is chosen when the engine serves",
            "--kv_cache_dtype of trtllm-serve",
            "int8_kv_cache! fp8_kv_cache!",
        ),
        ("a quantized checkpoint is read from its own directory", "--model_dir", "quant_ckpt_path"),
        ("only Hugging Face's form is read", "--model_dir", "meta_ckpt_dir"),
        (
            "the model's config.json says it",
            "--model_dir",
            "vocab_size n_positions n_layer n_head n_kv_head n_embd inter_size multiple_of ffn_dim_multiplier "
            "rms_norm_eps hidden_act rotary_base moe_num_experts moe_top_k",
        ),
        ("all layers are rounded alike", "--use_fp8", "use_meta_fp8_rowwise_recipe!"),
        ("a checkpoint is its config and its weights", "`quire inspect`", "save_config_only!"),
        (
            "heads are kept as the checkpoint has them",
            "the checkpoint's own config",
            "remove_duplicated_kv_heads!",
        ),
    ),
)
CONVERTING = Dialect(foreign=CONVERSION)

_LLM_ACCEPTED = (
    (
        _KERNELS,
        "backend attn_backend moe_backend moe_config use_cuda_graph! torch_compile_config",
    ),
    (_KERNELS, "enable_autotuner! extended_runtime_perf_knob_config enable_min_latency! allreduce_strategy"),
    (_KERNELS, "batching_type fast_build! enable_build_cache embedding_parallel_mode workspace calib_config"),
    (
        "prompts are always computed in chunks beside decodes",
        "enable_chunked_prefill! enable_chunked_context!",
    ),
    ("there is one policy, and nothing is evicted before its turn", "scheduler_config dynamic_batch_config"),
    ("overlap is an option: async_scheduling", "disable_overlap_scheduler!"),
    ("code from a checkpoint never runs", "trust_remote_code!"),
    ("any of the grammar's back ends gives the same language", "guided_decoding_backend"),
    (
        "all ranks are processes of one machine",
        "gpus_per_node mpi_session orchestrator_type enable_attention_dp!",
    ),
    (
        "experts are divided like MLPs, unless --enable-expert-parallel is given",
        "moe_expert_parallel_size moe_tensor_parallel_size moe_cluster_parallel_size ep_size ep cluster_size",
    ),
    ("a prompt may be as long as max_seq_len allows", "max_input_len"),
    ("any width runs, within max_batch_size", "max_beam_width"),
    ("output is made into text beside the engine", "num_postprocess_workers postprocess_tokenizer_dir"),
    (
        "/metrics and get_metrics always have these figures",
        "iter_stats_max_iterations request_stats_max_iterations",
    ),
    ("/metrics and get_metrics always have these figures", "enable_iter_perf_stats! enable_iter_req_stats!"),
    ("/metrics and get_metrics always have these figures", "print_iter_log! perf_metrics_max_requests"),
    (
        "/metrics and get_metrics always have these figures",
        "return_perf_metrics! enable_layerwise_nvtx_marker!",
    ),
    ("adapters have slots of their own", "peft_cache_config"),
    ("a progress bar is an option of generate", "enable_tqdm!"),
    ("the engine's process runs no other Python", "garbage_collection_gen0_threshold env_overrides"),
    ("Quire logs through Python's logging", "log_level"),
    ("steps are always padded to a size with a graph, and no bit depends on it", "enable_padding"),
    # of KvCacheConfig
    ("cached prefixes are reused to the token", "enable_partial_reuse! copy_on_partial_reuse!"),
    ("the KV cache stays in memory", "onboard_blocks! host_cache_size secondary_offload_min_priority"),
    ("decoders have no encoder", "cross_kv_cache_fraction"),
    ("no one listens to changes of the cache", "event_buffer_max_size attention_dp_events_gather_period_ms"),
    # of ModelRunner
    ("memory is planned before anything is allocated", "max_tokens_in_paged_kv_cache gpu_weights_percent"),
    (_KERNELS, "multi_block_mode! is_enc_dec! use_runtime_defaults! enable_context_fmha_fp32_acc!"),
    ("weights are mapped from files", "use_gpu_direct_storage!"),
    ("only Hugging Face's form is read", "lora_ckpt_source"),
    (
        "memory is planned before anything is allocated",
        "max_gpu_total_bytes fail_fast_on_attention_window_too_large!",
    ),
)
_LLM_REFUSED = (
    (
        "ranks divide layers and stages, and not one sequence",
        "tensor_parallel_size or pipeline_parallel_size",
        "context_parallel_size=1 cp_size=1 cp_config={}",
    ),
    ("attention sees what the model says", "a model with a sliding window", "max_attention_window"),
    (
        "drafting is chosen by an option",
        "speculative_config of LLM",
        "medusa_choices eagle_choices lookahead_config",
    ),
    ("attention sees what the model says", "a model with a sliding window", "max_attention_window_size"),
    ("attention sees what the model says", "a model with a sliding window", "sink_token_length=0"),
    ("attention sees what the model says", "a plain model", "sparse_attention_config"),
    ("prompts are tokens alone", "an adapter", "enable_prompt_adapter! max_prompt_adapter_token=0"),
    (
        "classes of another engine cannot run in this one",
        "logits_processor of SamplingParams",
        "checkpoint_loader",
    ),
    ("the KV cache stays in this process", "one engine", "cache_transceiver_config kv_connector_config"),
    ("the KV cache stays in this process", "one engine", "server_role metadata_server_config_file"),
    ("the KV cache stays in this process", "one engine", "disagg_cluster_uri"),
    ("code from a file never runs", "the model's own tokenizer", "custom_tokenizer custom_module_dirs*"),
    ("nothing is sent to a collector", "/metrics", "otlp_traces_endpoint"),
    ("inputs are text", "text alone", "media_io_kwargs"),
)
SERVING = Dialect(
    {
        "max_batch_size": "max_num_seqs",
        "max_num_tokens": "max_num_batched_tokens",
        "max_seq_len": "max_model_len",
        "tp_size": "tensor_parallel_size",
        "pp_size": "pipeline_parallel_size",
        "free_gpu_memory_fraction": "gpu_memory_utilization",
        "kv_cache_free_gpu_memory_fraction": "gpu_memory_utilization",
        "kv_cache_enable_block_reuse": "enable_prefix_caching",
        "enable_block_reuse": "enable_prefix_caching",
        "tokens_per_block": "block_size",
        "tool_parser": "tool_call_parser",
    },
    _table(_LLM_ACCEPTED, _LLM_REFUSED),
)

# Of quantize.py.
QUANTIZING = Dialect(
    foreign=_table(
        (
            ("the backend is the one that serves", "device device_map batch_size"),
            ("the same text gives the same weights", "seed"),
            ("pieces have calib_max_seq_length tokens", "tokenizer_max_seq_length"),
            ("Quire logs through Python's logging", "log_level"),
        ),
        (
            (
                "an engine's stages are chosen when it serves",
                "--pp_size of trtllm-serve",
                "pp_size=1 cp_size=1",
            ),
            (
                "the type of the KV cache is chosen when the engine serves",
                "--kv_cache_dtype of trtllm-serve",
                "kv_cache_dtype",
            ),
            (
                "only Hugging Face's form is read",
                "--model_dir",
                "nemo_ckpt_path decoder_type calib_tp_size calib_pp_size",
            ),
            ("all layers have one format", "--qformat", "autoq_format auto_quantize_bits"),
            ("the head has eight bits or is float", "`quire quantize`", "quantize_lm_head!"),
            (
                "heads that draft stay as they are",
                "speculative_config of LLM",
                "num_medusa_heads num_medusa_layers max_draft_len medusa_hidden_act medusa_model_dir "
                "quant_medusa_head!",
            ),
        ),
    )
)

# Of trtllm-bench.
MEASURING = Dialect(
    foreign=_table(
        (
            *_LLM_ACCEPTED,
            ("requests come all at once", "scheduler_policy eos_id warmup streaming! modality"),
            ("results are printed, and written by --report_json", "output_json request_json iteration_log"),
            (
                "a run ends when all its requests have",
                "dataset_lens target_input_len target_output_len beam_width",
            ),
            ("the prefix cache is on", "enable_chunked_context! kv_cache_reuse"),
        ),
        _LLM_REFUSED,
    )
)
