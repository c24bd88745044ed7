"""Fields of objects inside bodies: messages, tools, constraints."""

from __future__ import annotations

from quire.serve.fields.shapes import Refused, Shape, names

FUNCTION = Shape(
    names("name description parameters strict"), ignored={"defer_loading": "tools are always shown"}
)
TOOLS = Shape(
    names("type function custom"),
    ignored={"defer_loading": "tools are always shown"},
    inner={"function": FUNCTION, "custom": Shape(names("name description format"))},
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
    names("type text refusal cache_control"),
    ignored={
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
    names("id type function custom"),
    ignored={"index": "calls are in order", "extra_content": "other servers' own data"},
    inner={"function": Shape(names("name arguments"), nulls=True, template=True)},
    nulls=True,
    template=True,
)
MESSAGES = Shape(
    names(
        "role content name tool_calls tool_call_id reasoning reasoning_content thinking refusal cache_control"
    ),
    ignored=dict.fromkeys(
        ("annotations", "id", "reasoning_details", "provider_specific_fields"),
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
