"""Fields that several endpoints share, with their meanings, and those of other servers that none of them has."""

from __future__ import annotations

from quire.serve.fields.shapes import Refused, Shape, names

MODEL = {"model": "one of the served names; the first one by default"}

DRAW = {
    "temperature": "0 takes the likeliest token",
    "top_p": "keep the smallest set of tokens with this probability",
    "top_k": "keep this many of the likeliest tokens",
    "min_p": "keep tokens at least this fraction as likely as the best",
    "repetition_penalty": "divides the logits of tokens seen before",
    "presence_penalty": "subtracted from the logits of tokens in the output",
    "frequency_penalty": "subtracted once per occurrence in the output",
    "logit_bias": "values added to logits, by token id",
    "seed": "the same seed gives the same text",
    "stop": "texts that end the output",
    "stop_token_ids": "tokens that end the output",
    "ignore_eos": "go on after the end-of-sequence token",
    "min_tokens": "no end before this many tokens",
    "allowed_token_ids": "only these tokens",
    "bad_words": "words that are never produced",
    "repetition_detection": "ends the output at a repeated pattern: max_pattern_size, min_pattern_size, min_count",
    "include_stop_str_in_output": "keep the stop string",
    "skip_special_tokens": "leave special tokens out of the text",
    "structured_outputs": "a constraint on the answer (vLLM)",
    "logprob_token_ids": "with logprobs: those of these tokens instead of the likeliest",
    "stream_interval": "tokens per chunk of a stream",
    "vllm_xargs": "arguments for the engine's logits processors",
    "truncate_prompt_tokens": "keep this many tokens of the prompt; -1 as many as fit",
    "truncation_side": "which end of the prompt is cut: left (default) or right",
    "priority": "lower runs first, with --scheduling-policy priority",
    "cache_salt": "separates the prefix cache from that of other salts",
    "request_id": "id of the answer and of the log line",
}

CONSTRAINTS = {
    "response_format": "text, json_object (with a schema or without), json_schema or structural_tag",
    "guided_json": "JSON Schema (older vLLM)",
    "guided_regex": "regular expression (older vLLM)",
    "guided_choice": "list of texts (older vLLM)",
    "guided_grammar": "grammar (older vLLM)",
    "guided_whitespace_pattern": "white space in JSON (older vLLM)",
    "json_schema": "JSON Schema (SGLang)",
    "regex": "regular expression (SGLang)",
    "ebnf": "grammar (SGLang)",
}

GENERATE = {
    **MODEL,
    "stream": "answer with server-sent events",
    "stream_options": "include_usage, continuous_usage_stats",
    "n": "number of samples",
    **DRAW,
    **CONSTRAINTS,
    "prompt_logprobs": "log-probabilities of the prompt's tokens",
    "spaces_between_special_tokens": "put spaces between special tokens",
    "add_special_tokens": "add the tokenizer's special tokens to the prompt",
    "return_token_ids": "token ids of prompt and output",
    "return_metrics": "the times of the request in the answer, as `metrics` (docs/latency.md)",
    "return_tokens_as_token_ids": "write tokens in logprobs as token_id:N",
    "prediction": "a text that the output may follow, to draft from",
    "speculative_decoding": "false drafts nothing",
    "thinking_token_budget": "most tokens of reasoning; then the answer begins",
    "use_beam_search": "true returns the n best sequences of a beam search (docs/beam-search.md)",
    "beam_width": "sequences that the search keeps, n by default",
    "length_penalty": "beam search: exponent of the length that scores are divided by",
    "early_stopping": "beam search: true, false or never as in transformers; vLLM's search by default",
    "num_beam_groups": "beam search: groups that search in turn for different sequences",
    "diversity_penalty": "beam search: what a token loses for each beam of earlier groups that took it",
    "no_repeat_ngram_size": "beam search: runs of so many tokens occur once",
}

_NO_EFFECT = "has no effect on the answer"
LABELS = dict.fromkeys(
    (
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
    ),
    _NO_EFFECT,
) | {
    "service_tier": "there is one tier",
    "store": "answers are not stored",
    "session_id": _NO_EFFECT,
    "client_metadata": _NO_EFFECT,
}

OTHERS_IGNORED = {
    "mm_processor_kwargs": "there are no images to process",
    "media_io_kwargs": "there is no media to load",
    "return_mm_kwargs": "there are no images to process",
    "return_token_offsets": "applies to rendering alone",
    "routed_experts_prompt_start": "routed experts are not returned",
    "cache_prompt": "prefixes are always cached",
    "id_slot": "the scheduler chooses the slot",
    "slot_id": "the scheduler chooses the slot",
    "timings_per_token": "see /metrics",
    "return_progress": "see /metrics",
    "models": "one model is served",
    "rid": "use request_id",
    "input_type": "the model has no kinds of input",
    "drop_params": "fields that have no effect are always dropped",
}

_SAMPLER = "this sampler is not implemented"
_TRANSFER = "this server does not transfer caches"
OTHERS_REFUSED = {
    "watermarking": Refused("watermarks are not implemented"),
    "kv_transfer_params": Refused(_TRANSFER),
    "ec_transfer_params": Refused(_TRANSFER),
    "extra_body": Refused("put its fields into the body itself"),
    "extra_args": Refused("there are no extensions that read it"),
    "repeat_penalty": Refused("use repetition_penalty", (1, 1.0)),
    "repeat_last_n": Refused("penalties see the whole prompt and output", (-1, 0, 64)),
    "n_predict": Refused("use max_tokens", (-1,)),
    "max_new_tokens": Refused("use max_tokens"),
    "min_new_tokens": Refused("use min_tokens", (0,)),
    "num_predict": Refused("use max_tokens", (-1,)),
    "n_keep": Refused("prompts are not shifted", (0, -1)),
    "n_probs": Refused("use logprobs", (0,)),
    "stop_regex": Refused("use stop"),
    "no_stop_trim": Refused("use include_stop_str_in_output"),
    "samplers": Refused("the order of samplers is fixed (docs/sampling.md)"),
    "typical_p": Refused(_SAMPLER, (1, 1.0)),
    "top_a": Refused(_SAMPLER, (0, 0.0)),
    "tfs": Refused(_SAMPLER, (1, 1.0)),
    "tfs_z": Refused(_SAMPLER, (1, 1.0)),
    "top_n_sigma": Refused(_SAMPLER, (-1, -1.0, 0, 0.0)),
    "mirostat": Refused(_SAMPLER, (0,)),
    "mirostat_mode": Refused(_SAMPLER, (0,)),
    "dynatemp_range": Refused(_SAMPLER, (0, 0.0)),
    "dry_multiplier": Refused(_SAMPLER, (0, 0.0)),
    "xtc_probability": Refused(_SAMPLER, (0, 0.0)),
    "smoothing_factor": Refused(_SAMPLER, (0, 0.0)),
    "epsilon_cutoff": Refused(_SAMPLER, (0, 0.0)),
    "eta_cutoff": Refused(_SAMPLER, (0, 0.0)),
    "guidance_scale": Refused("classifier-free guidance is not implemented", (1, 1.0)),
    "negative_prompt": Refused("classifier-free guidance is not implemented"),
    "custom_logit_processor": Refused("code in requests is never run"),
    "return_hidden_states": Refused("hidden states are not returned; see /pooling"),
    "return_routed_experts": Refused("routed experts are not returned"),
    "prompt_embeds": Refused("prompts are text or token ids"),
    "lora_path": Refused("name the adapter as model"),
}

FUNCTION = Shape(
    names("name description parameters strict"), ignored={"defer_loading": "tools are always shown"}
)
TOOLS = Shape(
    names("type function"), ignored={"defer_loading": "tools are always shown"}, inner={"function": FUNCTION}
)
JSON_SCHEMA = Shape(
    names("schema"),
    ignored=dict.fromkeys(("name", "description", "strict"), "the answer always matches the schema"),
)
RESPONSE_FORMAT = Shape(
    names("type schema json_schema format structures triggers"), inner={"json_schema": JSON_SCHEMA}
)
STREAM_OPTIONS = Shape(
    names("include_usage continuous_usage_stats"), ignored={"include_obfuscation": "nothing is padded"}
)
STRUCTURED = Shape(
    names(
        "json regex choice grammar json_object structural_tag disable_any_whitespace disable_additional_properties "
        "whitespace_pattern select"
    ),
    ignored=dict.fromkeys(("_backend", "_backend_was_auto", "disable_fallback"), "there is one backend"),
)
REPETITION = Shape(names("max_pattern_size min_pattern_size min_count"))

CONTENT = Shape(
    names("type text refusal"),
    ignored={
        "cache_control": "prefixes are always cached",
        "annotations": "they are no text",
        "logprobs": "they are no text",
    },
    refused=dict.fromkeys(
        ("image_url", "image", "input_audio", "audio_url", "video_url", "file"),
        Refused("content is text"),
    ),
    template=True,
    nulls=True,
)
CALL = Shape(
    names("id type function"),
    ignored={"index": "calls are in order", "extra_content": "other servers' own data"},
    inner={"function": Shape(names("name arguments"), nulls=True, template=True)},
    nulls=True,
    template=True,
)
MESSAGES = Shape(
    names("role content name tool_calls tool_call_id reasoning reasoning_content thinking refusal"),
    ignored=dict.fromkeys(
        ("annotations", "id", "cache_control", "reasoning_details", "provider_specific_fields"),
        "the chat template does not read it",
    ),
    refused={
        "function_call": Refused("use tool_calls"),
        "audio": Refused("content is text"),
        "prefix": Refused("use continue_final_message"),
    },
    inner={"content": CONTENT, "tool_calls": CALL},
    template=True,
    nulls=True,
)
INNER = {
    "stream_options": STREAM_OPTIONS,
    "response_format": RESPONSE_FORMAT,
    "structured_outputs": STRUCTURED,
    "repetition_detection": REPETITION,
    "prediction": Shape(names("type content"), inner={"content": Shape(names("type text"))}),
}
