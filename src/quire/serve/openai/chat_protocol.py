"""The bodies and answers of /v1/chat/completions as structs."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.fields import says
from quire.serve.fields import common
from quire.serve.fields.common import Count, CountOrAll, Messages, Positive
from quire.serve.fields.foreign import ANSWERS_REFUSED, LABELS, OTHERS_IGNORED
from quire.serve.fields.shapes import INNER, MESSAGES, TOOLS, Fields, Refused
from quire.serve.openai.logprobs import ChatLogprobs, PromptLogprobs
from quire.serve.openai.protocol import AnswerMetrics, SamplingFields, UsageInfo


class ChatRequest(SamplingFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[Messages, says("the conversation, as text or text parts")]
    tools: common.Tools | None = None
    tool_choice: (
        Annotated[str | dict[str, Any], says("auto, none, required, a function, or allowed_tools")] | None
    ) = None
    parallel_tool_calls: Annotated[bool, says("false allows one call")] | None = None
    add_generation_prompt: common.BeginAnswer = None
    continue_final_message: common.GoOn = False
    chat_template: common.Template | None = None
    chat_template_kwargs: common.TemplateWords | None = None
    documents: Annotated[list[dict[str, Any]], says("documents for templates that read them")] | None = None
    reasoning_effort: (
        Annotated[str, says("a variable of the chat template; none turns reasoning off")] | None
    ) = None
    verbosity: Annotated[str, says("a variable of the chat template")] | None = None
    enable_thinking: Annotated[bool, says("turns reasoning on or off in the chat template")] | None = None
    max_completion_tokens: Annotated[Positive, says("most tokens of output")] | None = None
    max_tokens: Annotated[Count, says("the same, under its older name")] | None = None
    logprobs: Annotated[bool | None, says("return the log-probability of each token")] = False
    top_logprobs: Annotated[CountOrAll, says("and of this many of the likeliest")] | None = None
    echo: Annotated[bool, says("repeat the last message if the answer has its role")] = False
    include_reasoning: Annotated[bool, says("false leaves the reasoning out of the answer")] = True
    return_prompt_text: Annotated[bool, says("the rendered conversation as prompt_text")] | None = None
    return_progress: common.Progress = False


_OLD = Refused("it is deprecated: use tools and tool_choice")
CHAT = Fields(
    path="/v1/chat/completions",
    body=ChatRequest,
    ignored={**LABELS, **OTHERS_IGNORED},
    refused={
        **ANSWERS_REFUSED,
        "functions": _OLD,
        "function_call": _OLD,
        "web_search_options": Refused("this server does not search", empty=False),
        "separate_reasoning": Refused("reasoning is always apart; see include_reasoning", (True,)),
        "stream_reasoning": Refused("use include_reasoning", (True,)),
        "mock_response": Refused("answers come from the model"),
    },
    inner={**INNER, "messages": MESSAGES, "tools": TOOLS},
)

CHAT_TOKENS = replace(CHAT, path="/v1/chat/completions/input_tokens")


class CalledFunction(msgspec.Struct):
    """`arguments` is JSON text, incomplete if a limit cut the call off."""

    name: str
    arguments: str


class CustomInput(msgspec.Struct):
    """`input` is the text for a custom tool. Streams name the tool before."""

    input: str
    name: str | UnsetType = UNSET


class ToolCall(msgspec.Struct):
    id: str
    function: CalledFunction | UnsetType = UNSET
    type: Literal["function", "custom"] = "function"
    custom: CustomInput | UnsetType = UNSET


class AnswerMessage(msgspec.Struct):
    """`reasoning` is vLLM's newer name for `reasoning_content`; both are set."""

    role: str
    content: str | None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(msgspec.Struct):
    """Answer of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    object: Literal["chat.completion"] = "chat.completion"
    service_tier: str | None = None
    system_fingerprint: str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    kv_transfer_params: None = None
    metrics: AnswerMetrics | None = None


class FunctionDelta(msgspec.Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    """The new part of one call: id, type and name come once, first."""

    index: int
    function: FunctionDelta | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    custom: CustomInput | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    """The new part of a message: the role comes once, first."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    """One chunk of a streamed chat. `prompt_progress` is llama.cpp's."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: str | None = None
    usage: UsageInfo | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType | None = UNSET
    metrics: AnswerMetrics | UnsetType = UNSET
    prompt_progress: dict[str, int] | UnsetType = UNSET
