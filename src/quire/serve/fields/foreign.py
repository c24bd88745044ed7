"""Fields of other servers: ignored as they change no answer, or refused by name. Every endpoint knows them."""

from __future__ import annotations

from typing import Any

from quire.serve.fields.shapes import Refused


def _ignored(why: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), why)


def _refused(why: str, names: str, *neutral: Any, off: bool = True) -> dict[str, Refused]:
    return dict.fromkeys(names.split(), Refused(why, neutral, off=off))


_NO_EFFECT = "has no effect on the answer"
LABELS = {
    **_ignored(_NO_EFFECT, "user metadata safety_identifier prompt_cache_key prompt_cache_retention"),
    **_ignored(_NO_EFFECT, "prompt_cache_options session_id client_metadata"),
    "service_tier": "there is one tier",
    "store": "answers are not stored",
}

OTHERS_IGNORED = {
    **_ignored("there are no images to process", "mm_processor_kwargs return_mm_kwargs"),
    "media_io_kwargs": "there is no media to load",
    "return_token_offsets": "applies to rendering alone",
    "routed_experts_prompt_start": "routed experts are not returned",
    "cache_prompt": "prefixes are always cached",
    **_ignored("the scheduler chooses the slot", "id_slot slot_id"),
    **_ignored("see /metrics", "timings_per_token return_progress"),
    "models": "`model` alone chooses",
    "rid": "use request_id",
    "input_type": "the model has no kinds of input",
    "drop_params": "fields that have no effect are always dropped",
    "keep_alive": "options of the server say how long a model stays loaded",
    "guided_decoding_backend": "there is one backend",
    "extra_key": "use cache_salt",
    "pad_token_id": "prompts are not padded",
    "use_cache": "the cache is always used",
    "safety_settings": "there are no filters to set",
    **_ignored(
        "the sampler that it belongs to is refused",
        "mirostat_tau mirostat_eta dynatemp_exponent xtc_threshold dry_base dry_allowed_length dry_penalty_last_n "
        "dry_sequence_breakers",
    ),
}

_SAMPLER = "this sampler is not implemented"
_ORDER = "the order of samplers is fixed (docs/sampling.md)"
_CODE = "code in requests is never run"
OTHERS_REFUSED = {
    **_refused("watermarks are not implemented", "watermarking watermark"),
    **_refused("this server does not transfer caches", "kv_transfer_params ec_transfer_params"),
    **_refused("put its fields into the body itself", "extra_body options parameters sampling_params"),
    **_refused("put its fields into the body itself", "generation_config"),
    **_refused("there are no extensions that read it", "extra_args"),
    **_refused("use repetition_penalty", "repeat_penalty", 1, 1.0),
    **_refused("penalties see the whole prompt and output", "repeat_last_n", -1, 0, 64),
    **_refused("use max_tokens", "n_predict max_new_tokens num_predict max_length", -1),
    **_refused("use min_tokens", "min_new_tokens min_length", 0),
    **_refused("the server's --max-model-len is the context", "num_ctx"),
    **_refused("use truncate_prompt_tokens", "truncate", "NONE"),
    **_refused("use truncate_prompt_tokens", "truncation", "disabled"),
    **_refused("prompts are not shifted", "n_keep", 0, -1),
    **_refused("use logprobs", "n_probs", 0),
    **_refused("use stop", "stop_regex stop_strings stopping_strings custom_stop_strings"),
    **_refused("use include_stop_str_in_output", "no_stop_trim"),
    **_refused(_ORDER, "samplers sampler_order temperature_last"),
    **_refused(_SAMPLER, "typical_p tfs tfs_z", 1, 1.0),
    **_refused(_SAMPLER, "top_n_sigma", -1, -1.0, 0, 0.0),
    **_refused(_SAMPLER, "top_a mirostat mirostat_mode dynatemp_range dry_multiplier", 0, 0.0),
    **_refused(_SAMPLER, "xtc_probability smoothing_factor epsilon_cutoff eta_cutoff penalty_alpha", 0, 0.0),
    **_refused("classifier-free guidance is not implemented", "guidance_scale", 1, 1.0),
    **_refused("classifier-free guidance is not implemented", "negative_prompt"),
    **_refused(_CODE, "custom_logit_processor logits_processors"),
    **_refused("hidden states are not returned; see /pooling", "return_hidden_states"),
    **_refused("routed experts are not returned", "return_routed_experts"),
    **_refused("prompts are text or token ids", "prompt_embeds input_embeds"),
    **_refused("name the adapter as model", "lora_path lora_id lora_name lora adapter_id"),
    **_refused("token ids are a prompt", "input_ids"),
    **_refused("use prompt, input or messages", "inputs contents"),
    **_refused("content is text", "images image_data audio_data video_data files"),
}

_CHAT = "conversations are for /v1/chat/completions"
_BEAMS = "there is no beam search here"
_THINKING = "use reasoning_effort, chat_template_kwargs or thinking_token_budget"
_TAG = "use structured_outputs.structural_tag"
_HIDDEN = "it is not part of this answer"
_ELSEWHERE = "it is for /v1/completions and /v1/chat/completions"
# Fields that some answers of a model take, each refused by the endpoints of others that do not take it.
ANSWERS_REFUSED = {
    **OTHERS_REFUSED,
    **_refused("one answer is made", "n", 1),
    **_refused("use n", "candidate_count num_return_sequences", 1),
    **_refused("it is for /v1/completions", "best_of", 1),
    **_refused("it is for /v1/completions", "suffix prompt raw"),
    **_refused("it is for /v1/responses", "input"),
    **_refused("the answer does not repeat the prompt", "echo return_full_text"),
    **_refused(_CHAT, "instructions system messages tools functions documents continue_final_message"),
    **_refused(_CHAT, "chat_template chat_template_kwargs verbosity"),
    **_refused(_CHAT, "tool_choice function_call", "none", "auto"),
    **_refused(_CHAT, "add_generation_prompt", True),
    **_refused("use chat_template", "template"),
    **_refused("use messages or token ids", "context"),
    **_refused("reasoning is returned", "include_reasoning", True),
    **_refused(_THINKING, "enable_thinking think", off=False),
    **_refused(_THINKING, "thinking thinking_config thinking_budget reasoning reasoning_budget"),
    **_refused(_THINKING, "reasoning_effort output_config"),
    **_refused("reasoning is always apart", "reasoning_format", "auto", "deepseek"),
    **_refused("answers are text", "modalities", ["text"]),
    **_refused("answers are text", "audio"),
    **_refused("use max_output_tokens", "max_tokens"),
    **_refused("use max_tokens", "max_completion_tokens max_output_tokens"),
    **_refused("use stop", "stop_sequences"),
    **_refused("use the format of this API", "response_format", {"type": "text"}),
    **_refused("use the format of this API", "output_format text"),
    **_refused("use json_schema", "response_json_schema"),
    **_refused("use json_schema", "response_mime_type", "text/plain"),
    **_refused(_TAG, "grammar_lazy grammar_triggers"),
    **_refused("use grammar", "grammar_string"),
    **_refused(_HIDDEN, "logprobs prompt_logprobs return_logprob return_token_ids"),
    **_refused(_HIDDEN, "top_logprobs", 0),
    **_refused("use temperature: 0 takes the likeliest token", "do_sample", True, off=False),
    **_refused(_BEAMS, "num_beams num_beam_groups", 1),
    **_refused(_BEAMS, "use_beam_search"),
    **_refused(_BEAMS, "no_repeat_ngram_size diversity_penalty", 0, 0.0),
    **_refused(_BEAMS, "length_penalty", 1, 1.0),
    **_refused("use bad_words or logit_bias", "bad_words_ids suppress_tokens sequence_bias"),
    **_refused("use structured_outputs", "force_words_ids"),
    **_refused("use stop_token_ids", "eos_token_id forced_eos_token_id"),
    **_refused("use ignore_eos", "ban_eos_token"),
    **_refused("use max_tokens", "t_max_predict_ms", 0, -1),
    **_refused(_ELSEWHERE, "prediction"),
    **_refused(_ELSEWHERE, "speculative_decoding", True, off=False),
}
