"""The fields of Anthropic's endpoints."""

from __future__ import annotations

from quire.serve.anthropic.protocol import CountRequest, MessagesRequest
from quire.serve.fields.common import CONSTRAINTS, DRAW, MODEL, OTHERS_IGNORED, OTHERS_REFUSED
from quire.serve.fields.shapes import Fields, Refused, Shape, names

_CACHED = {"cache_control": "prefixes are always cached"}
_BLOCK = Shape(
    names("type text thinking signature data id name input tool_use_id content is_error tool_name"),
    ignored={**_CACHED, "citations": "they are no text", "caller": "the client runs every tool"},
    refused={"source": Refused("content is text"), "title": Refused("content is text")},
)
_BLOCKS = Shape(_BLOCK.taken, _BLOCK.ignored, _BLOCK.refused, inner={"content": _BLOCK})
_FORMAT = Shape(names("type schema"), ignored=names("name description strict"))

_TAKEN = {
    **MODEL,
    "messages": "text, thinking, tool_use and tool_result blocks; roles user, assistant and system",
    "system": "a text or text blocks",
    "tools": "functions that the model may call",
    "tool_choice": "auto, any, none, or a tool; disable_parallel_tool_use",
    "thinking": "switches reasoning on or off, if the model has any; budget_tokens bounds it",
    "output_config": "format (a JSON Schema) and effort (a variable of the chat template)",
    "output_format": "the same format, under its older name",
    "chat_template_kwargs": "variables of the chat template",
}
_IGNORED = {
    **OTHERS_IGNORED,
    **_CACHED,
    "betas": "features are known by their fields",
    "context_management": "the conversation is taken as it is sent",
    "thread": "every call sends its whole conversation",
    "user_profile_id": "has no effect on the answer",
    "inference_geo": "answers are computed here",
    "speed": "there is one speed",
    "diagnostics": "has no effect on the answer",
    "fallbacks": "one model is served",
}
_REFUSED = {
    **OTHERS_REFUSED,
    "container": Refused("this server has none"),
    "mcp_servers": Refused("this server calls none"),
}
_INNER = {
    "messages": Shape(names("role content"), ignored=_CACHED, inner={"content": _BLOCKS}),
    "system": _BLOCK,
    "tools": Shape(
        names(
            "type name description input_schema strict max_uses allowed_domains blocked_domains user_location"
        ),
        ignored={
            **_CACHED,
            "eager_input_streaming": "input is always streamed",
            "defer_loading": "tools are always shown",
            "input_examples": "templates do not read it",
            "allowed_callers": "the client runs every tool",
        },
    ),
    "tool_choice": Shape(names("type name disable_parallel_tool_use")),
    "thinking": Shape(names("type budget_tokens"), ignored={"display": "reasoning is returned whole"}),
    "output_config": Shape(
        names("effort format"),
        ignored={"task_budget": "max_tokens bounds the answer"},
        inner={"format": _FORMAT},
    ),
    "output_format": _FORMAT,
}

COUNT_TOKENS = Fields(
    path="/v1/messages/count_tokens",
    body=CountRequest,
    taken=_TAKEN,
    ignored={
        **_IGNORED,
        **dict.fromkeys(("max_tokens", "metadata", "stream", "temperature"), "nothing is generated"),
    },
    refused=_REFUSED,
    inner=_INNER,
)

MESSAGES = Fields(
    path="/v1/messages",
    body=MessagesRequest,
    taken={
        **_TAKEN,
        "max_tokens": "most tokens of output",
        "stream": "answer with server-sent events",
        "stop_sequences": "texts that end the output",
        **{name: DRAW[name] for name in ("temperature", "top_p", "top_k", "seed", "cache_salt")},
    },
    ignored={**_IGNORED, "metadata": "has no effect on the answer", "service_tier": "there is one tier"},
    refused={
        **_REFUSED,
        **dict.fromkeys(("response_format", *CONSTRAINTS), Refused("use output_config.format")),
        "stop": Refused("use stop_sequences"),
    },
    inner=_INNER,
)
