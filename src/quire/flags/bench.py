"""Flags of vLLM's benchmarks that Quire's lack: accepted because they change no figure, or refused by name."""

from __future__ import annotations

from quire.flags.table import foreign_table

_DETOKENIZE = ("Outputs stay token ids", "disable_detokenize!")
_PROFILE = ("steps are traced by the server", "/start_profile of a server with --profiler-config", "profile!")
_ONE = ("a prompt has one output", "bench serve --extra-body", "n=1 use_beam_search!")

SERVE = foreign_table(
    accepted=(
        ("The tokenizer's own files say how it works", "tokenizer_mode skip_tokenizer_init!"),
        ("Prompts of datasets are sent as they are", "skip_chat_template! no_stream!"),
        ("The server numbers its requests", "request_id_prefix"),
        (
            "It belongs to a dataset that is not read here",
            "hf_subset hf_split hf_name hf_output_len spec_bench_output_len spec_bench_category sonnet_input_len "
            "sonnet_output_len sonnet_prefix_len blazedit_min_distance blazedit_max_distance random_batch_size "
            "no_reranker! random_mm_base_items_per_request random_mm_num_mm_items_range_ratio "
            "random_mm_limit_mm_per_prompt random_mm_bucket_config",
        ),
        ("Plots have no such colours", "timeline_itl_thresholds"),
    ),
    refused=(
        ("beam search is asked for in the body", "--extra-body", "use_beam_search!"),
        _PROFILE,
        ("one model is asked for", "--model", "lora_modules* lora_assignment"),
        ("the server renders conversations", "--extra-body", "chat_template_kwargs"),
        (
            "other requests' waits are measured on all of them",
            "the metric itl_prefill",
            "probe_request_rate=0,0.0",
        ),
        ("runs are plotted as images", "--plot", "plot_timeline! plot_dataset_stats!"),
    ),
)
LATENCY = foreign_table(accepted=(_DETOKENIZE,), refused=(_ONE, _PROFILE))
THROUGHPUT = foreign_table(
    accepted=(
        _DETOKENIZE,
        ("One engine runs all requests", "async_engine!"),
        ("Weights are paged in by a first request", "num_warmups"),
    ),
    refused=(
        _ONE,
        _PROFILE,
        ("prompts are random, or ShareGPT's with --dataset-path", "--dataset-path", "dataset_name=random,sharegpt"),
        ("adapters are measured through a server", "bench serve --model", "lora_path"),
        ("lengths have one name here", "--input-len, --output-len, --prefix-len",
         "random_input_len random_output_len random_prefix_len"),
        ("lengths do not vary", "bench serve --random-range-ratio", "random_range_ratio=0,0.0"),
    ),
)  # fmt: skip
