"""Names of the engine's options that commands use, in groups. A command refuses those that it does not name."""

from __future__ import annotations

from dataclasses import fields

from quire.config import CacheConfig, GrammarConfig, SpeculationConfig
from quire.flags.table import ENGINE_OPTIONS
from quire.lora.options import LoraConfig

FILES = frozenset({"model", "revision", "hf_token", "download_dir"})
TOKENIZER = frozenset({"tokenizer", "tokenizer_mode", "tokenizer_revision"})
CONFIG = frozenset({"architecture", "hf_overrides", "load_format", "rope_scaling", "rope_theta"})
WEIGHTS = frozenset(
    {
        "dtype",
        "quantization",
        "quantization_activations",
        "quantization_group_size",
        "quantization_pure",
        "quantization_symmetric",
    }
)
COMPUTE = frozenset({"backend", "batch_invariant", "device", "isa", "threads"})
SHARES = frozenset({"enable_expert_parallel", "exact_across_ranks", "tensor_parallel_size"})


def names(*sections: type) -> frozenset[str]:
    """Collect the options of some sections."""
    return frozenset(f.name for section in sections for f in fields(section))


CONVERTING = FILES | CONFIG | WEIGHTS | SHARES
AHEAD = names(SpeculationConfig) | {
    "block_size", "enable_lora", "kv_cache_dtype", "max_loras", "max_num_batched_tokens", "max_num_seqs",
}  # fmt: skip
"""AHEAD are options that kernels of GPUs are compiled for."""
BUILDING = CONVERTING | COMPUTE | AHEAD | {"max_model_len"}
PLANNING = (
    CONVERTING | COMPUTE | names(CacheConfig, LoraConfig, SpeculationConfig) |
    {
        "disable_sliding_window", "distributed_executor_backend", "machine_limits", "max_model_len",
        "max_num_batched_tokens", "max_num_seqs", "model_impl", "nnodes", "pipeline_parallel_size", "target_step_time",
    }
) - {"enable_prefix_caching", "fully_sharded_loras"}  # fmt: skip

# What concerns other requests than those of the benches: chats, vectors, constraints, logprobs, priorities.
BENCHES = (ENGINE_OPTIONS - names(GrammarConfig)) - {
    "chat_template", "generation_config", "logprobs_mode", "max_logprobs", "node_rank", "override_generation_config",
    "pooler_config", "profiler_config", "scheduling_policy",
}  # fmt: skip
ONE_TEXT = (BENCHES | {"generation_config", "override_generation_config"}) - names(LoraConfig) - {
    "enable_prefix_caching", "long_prefill_token_threshold", "max_long_partial_prefills", "max_num_partial_prefills",
    "skip_tokenizer_init",
}  # fmt: skip
CHATS = ONE_TEXT | {"chat_template", "enable_prefix_caching"}
QUANTIZING = FILES | TOKENIZER | COMPUTE
MEASURING = QUANTIZING | CONFIG | WEIGHTS | {"kv_cache_dtype", "model_impl"}
INSPECTING = FILES | {"architecture"}
