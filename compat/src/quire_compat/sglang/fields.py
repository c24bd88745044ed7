"""Fields of SGLang's /generate."""

from __future__ import annotations

from quire.serve.fields.shapes import Fields, Refused, Shape
from quire_compat.sglang.calls import GenerateBody

SAMPLING = Shape(
    {
        "max_new_tokens": "most tokens of output, 128 by default; 0 computes the prompt alone",
        "min_new_tokens": "no end before this many tokens",
        "stop": "texts that end the output",
        "stop_token_ids": "tokens that end the output",
        "temperature": "0 takes the likeliest token",
        "top_p": "keep the smallest set of tokens with this probability",
        "top_k": "keep this many of the likeliest tokens",
        "min_p": "keep tokens at least this fraction as likely as the best",
        "frequency_penalty": "subtracted once per occurrence in the output",
        "presence_penalty": "subtracted from the logits of tokens in the output",
        "repetition_penalty": "divides the logits of tokens seen before",
        "n": "number of samples",
        "json_schema": "JSON Schema of the output",
        "regex": "regular expression of the output",
        "ebnf": "grammar of the output",
        "structural_tag": "constraints on parts of the output",
        "ignore_eos": "go on after the end-of-sequence token",
        "skip_special_tokens": "leave special tokens out of the text",
        "spaces_between_special_tokens": "put spaces between special tokens",
        "no_stop_trim": "keep the stop string",
        "logit_bias": "values added to logits, by token id",
        "sampling_seed": "the same seed gives the same text",
        "stream_interval": "tokens per event of a stream",
        "custom_params": "arguments for the engine's logits processors",
    },
    refused={
        "stop_regex": Refused("use stop"),
        "max_tokens": Refused("use max_new_tokens"),
        "min_tokens": Refused("use min_new_tokens"),
        "seed": Refused("use sampling_seed"),
        "beam_width": Refused("use /v1/completions with use_beam_search", (1,)),
    },
)
_MEDIA = dict.fromkeys(
    ("image_data", "video_data", "audio_data", "input_embeds"), Refused("prompts are text or token ids")
)
_LABELS = dict.fromkeys(
    (
        "log_metrics",
        "no_logs",
        "custom_labels",
        "modalities",
        "conversation_id",
        "session_id",
        "routing_key",
        "data_parallel_rank",
        "routed_dp_rank",
        "return_bytes",
        "background",
    ),
    "has no effect on the answer",
)
_PROMPT = {
    "text": "a text, or a list of texts",
    "input_ids": "token ids instead of text, or a list of lists",
    "rid": "id of the answer; one for each prompt of a list",
    "priority": "lower runs first, with --scheduling-policy priority",
}
GENERATE = Fields(
    path="/generate",
    body=GenerateBody,
    taken={
        **_PROMPT,
        "sampling_params": "how tokens are drawn; one object, or one for each prompt",
        "stream": "answer with server-sent events that hold all text so far",
        "return_logprob": "return log-probabilities of the output",
        "logprob_start_len": "and of the prompt, from this position on; -1 for none",
        "top_logprobs_num": "and of this many of the likeliest tokens",
        "token_ids_logprob": "and of these tokens",
        "return_text_in_logprobs": "with the text of each token",
        "lora_path": "the adapter to use, by its served name",
        "cache_salt": "separates the prefix cache from that of other salts",
        "extra_key": "the same",
    },
    ignored=_LABELS,
    refused={
        **_MEDIA,
        "session_params": Refused("sessions are not kept: send the whole prompt, its prefix is cached"),
        "custom_logit_processor": Refused("code in requests is never run"),
        "return_hidden_states": Refused("hidden states are not returned; see /v1/embeddings"),
        "return_routed_experts": Refused("routed experts are not returned"),
        "require_reasoning": Refused("use /v1/chat/completions"),
        "bootstrap_host": Refused("this server does not transfer caches"),
        "bootstrap_room": Refused("this server does not transfer caches"),
    },
    inner={"sampling_params": SAMPLING},
)
