"""Fields of other servers: ignored as they change no answer, or refused by name. Every endpoint knows them."""

from __future__ import annotations

from quire.serve.fields.shapes import Refused

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
