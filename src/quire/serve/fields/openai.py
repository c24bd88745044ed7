"""The fields of OpenAI's endpoints."""

from __future__ import annotations

from dataclasses import replace

from quire.serve.fields.common import (
    CONTENT,
    DRAW,
    FUNCTION,
    GENERATE,
    INNER,
    LABELS,
    MESSAGES,
    MODEL,
    OTHERS_IGNORED,
    OTHERS_REFUSED,
    RESPONSE_FORMAT,
    STRUCTURED,
    TOOLS,
)
from quire.serve.fields.shapes import Fields, Refused, Shape, names
from quire.serve.openai.chat_protocol import ChatRequest
from quire.serve.openai.completions_protocol import CompletionRequest
from quire.serve.openai.responses_protocol import ResponsesRequest

COMPLETIONS = Fields(
    path="/v1/completions",
    body=CompletionRequest,
    taken={
        "prompt": "a text, texts, token ids, or lists of them",
        "suffix": "what follows the output, for models with fill-in-the-middle tokens",
        "max_tokens": "most tokens of output, 16 by default; 0 with echo scores the prompt",
        "echo": "repeat the prompt before the output",
        "logprobs": "log-probabilities of this many tokens per position",
        "best_of": "samples to draw; the n with the highest mean log-probability are returned",
        **GENERATE,
    },
    ignored={**LABELS, **OTHERS_IGNORED},
    refused=OTHERS_REFUSED,
    inner=INNER,
)


CONVERSATION = {
    "messages": "the conversation, as text or text parts",
    "tools": "functions that the model may call",
    "tool_choice": "auto, none, required, a function, or allowed_tools",
    "parallel_tool_calls": "false allows one call",
    "add_generation_prompt": "begin the answer's turn",
    "continue_final_message": "go on with the last message",
    "chat_template": "a template of the request's own (--trust-request-chat-template)",
    "chat_template_kwargs": "variables of the chat template",
    "documents": "documents for templates that read them",
    "reasoning_effort": "a variable of the chat template; none turns enable_thinking off",
    "verbosity": "a variable of the chat template",
    "enable_thinking": "a variable of the chat template",
}

_OLD = Refused("it is deprecated: use tools and tool_choice")
CHAT = Fields(
    path="/v1/chat/completions",
    body=ChatRequest,
    taken={
        **CONVERSATION,
        "max_completion_tokens": "most tokens of output",
        "max_tokens": "the same, under its older name",
        "logprobs": "return the log-probability of each token",
        "top_logprobs": "and of this many of the likeliest",
        "echo": "repeat the last message if the answer has its role",
        "include_reasoning": "false leaves the reasoning out of the answer",
        "return_prompt_text": "the rendered conversation as prompt_text",
        **GENERATE,
    },
    ignored={
        **LABELS,
        **OTHERS_IGNORED,
    },
    refused={
        **OTHERS_REFUSED,
        "functions": _OLD,
        "function_call": _OLD,
        "modalities": Refused("answers are text", (["text"],)),
        "audio": Refused("answers are text"),
        "web_search_options": Refused("this server does not search", empty=False),
        "separate_reasoning": Refused("reasoning is always apart; see include_reasoning", (True,)),
        "stream_reasoning": Refused("use include_reasoning", (True,)),
        "mock_response": Refused("answers come from the model"),
    },
    inner={**INNER, "messages": MESSAGES, "tools": TOOLS},
)

CHAT_TOKENS = replace(CHAT, path="/v1/chat/completions/input_tokens")

_ITEMS = Shape(
    names(
        "type role content phase summary encrypted_content call_id name arguments input output tool_calls reasoning "
        "reasoning_content"
    ),
    ignored=dict.fromkeys(("id", "status", "created_by"), "the answer does not depend on it"),
    inner={"content": CONTENT, "output": CONTENT, "summary": CONTENT},
    template=True,
)
_FORMAT = Shape({**names("type schema"), **RESPONSE_FORMAT.taken}, ignored=names("name description strict"))
RESPONSES = Fields(
    path="/v1/responses",
    body=ResponsesRequest,
    taken={
        **MODEL,
        "input": "a text, or items: messages, reasoning, calls and their results",
        "instructions": "a system message before the input",
        "max_output_tokens": "most tokens of output",
        "stream": "answer with server-sent events",
        "stream_options": "include_obfuscation, without effect",
        "text": "format (a constraint) and verbosity (a variable of the chat template)",
        "reasoning": "effort, a variable of the chat template",
        "tools": "functions and custom tools; web_search is dropped, and the header says so",
        "tool_choice": "auto, none, required, a tool, or allowed_tools",
        "parallel_tool_calls": "false allows one call",
        "include": "message.output_text.logprobs; the others have no effect",
        "top_logprobs": "log-probabilities of this many tokens",
        "truncation": "auto cuts the front of an input that is too long; disabled refuses it",
        "metadata": "returned with the answer",
        "user": "returned with the answer",
        "chat_template_kwargs": "variables of the chat template",
        **DRAW,
        "thinking_token_budget": "most tokens of reasoning; then the answer begins",
    },
    ignored={
        **{name: why for name, why in LABELS.items() if name not in ("metadata", "user")},
        **OTHERS_IGNORED,
        "max_tool_calls": "it limits tools that servers run, and there are none",
        "enable_response_messages": "messages are in output",
    },
    refused={
        "use_beam_search": Refused("use /v1/completions or /v1/chat/completions", (False,)),
        **OTHERS_REFUSED,
        **dict.fromkeys(
            (
                "background",
                "previous_response_id",
                "conversation",
                "previous_response",
                "previous_input_messages",
            ),
            Refused("responses are not stored: send the whole conversation as input"),
        ),
        "prompt": Refused("there are no stored prompts"),
        "context_management": Refused("the conversation is taken as it is sent"),
    },
    inner={
        "structured_outputs": STRUCTURED,
        "repetition_detection": INNER["repetition_detection"],
        "stream_options": Shape({}, ignored={"include_obfuscation": "nothing is padded"}),
        "text": Shape(names("format verbosity"), inner={"format": _FORMAT}),
        "reasoning": Shape(
            names("effort"),
            ignored=dict.fromkeys(
                ("summary", "generate_summary", "context", "mode"),
                "reasoning is returned whole, without a summary",
            ),
        ),
        "input": _ITEMS,
        "tools": Shape(
            {
                **FUNCTION.taken,
                **names("type format filters external_web_access search_context_size user_location"),
            },
            ignored={**FUNCTION.ignored, **dict.fromkeys(("search_content_types", "indexed_web_access"), "")},
        ),
    },
)
RESPONSE_TOKENS = replace(RESPONSES, path="/v1/responses/input_tokens")
