"""Requests of coding agents and chat interfaces, as their published code sends them, with shortened texts."""

from __future__ import annotations

from typing import Any

MODEL = "quire-stories"

COMMAND = {
    "type": "object",
    "properties": {"command": {"type": "string", "maxLength": 12, "description": "The command to run"}},
    "required": ["command"],
    "additionalProperties": False,
}
PATH = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"path": {"enum": ["a.txt", "b.txt"]}, "limit": {"type": "integer", "maximum": 99}},
    "required": ["path"],
    "additionalProperties": False,
}
PATCH = """start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: "*** Add File: " /(.+)/ LF ("+" /(.*)/ LF)+
%import common.LF
"""

# Codex CLI, codex-rs/core/src/client.rs: the Responses API, nothing stored.
CODEX: dict[str, Any] = {
    "model": MODEL,
    "instructions": "You are a coding agent.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Sandbox: read-only."}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
    ],
    "tools": [
        {
            "type": "function",
            "name": "shell",
            "description": "Runs it.",
            "strict": False,
            "parameters": COMMAND,
        },
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edits files.",
            "format": {"type": "grammar", "syntax": "lark", "definition": PATCH},
        },
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "service_tier": "priority",
    "prompt_cache_key": "0199c2e4-0000-7000-8000-000000000000",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "00000000-0000-4000-8000-000000000000"},
}
CODEX_HEADERS = {
    "originator": "codex_cli_rs",
    "session_id": "0199c2e4",
    "OpenAI-Beta": "responses=experimental",
}

# Claude Code: the Messages API with betas. CLAUDE_CODE_MAX_OUTPUT_TOKENS sets max_tokens.
CLAUDE_CODE: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 200,
    "system": [
        {
            "type": "text",
            "text": "You are an agent for the terminal.",
            "cache_control": {"type": "ephemeral"},
        },
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "messages": [
        {"role": "system", "content": "Today is Tuesday."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>Be kind.</system-reminder>"},
                {"type": "text", "text": "Read a file.", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ],
    "tools": [
        {"name": "Read", "description": "Reads.", "input_schema": PATH, "eager_input_streaming": True},
        {"name": "Bash", "description": "Runs.", "input_schema": COMMAND, "defer_loading": False},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": "user_0_account__session_0"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "stream": True,
}
CLAUDE_CODE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "x-app": "cli",
}


def function(name: str, parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "description": "A tool.", "parameters": parameters, **more},
    }


# Open WebUI, backend/open_webui/routers/openai.py, with native function calling.
OPEN_WEBUI: dict[str, Any] = {
    "stream": True,
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "Be helpful."},
        {"role": "user", "content": "Look at a file."},
    ],
    "tools": [function("read_file", PATH)],
    "stream_options": {"include_usage": True},
    "user": {"id": "1", "name": "Ann", "role": "admin"},
}
OPEN_WEBUI_TITLE: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Generate a title."}],
    "stream": False,
    "max_completion_tokens": 20,
    "metadata": {"task": "title_generation", "chat_id": "c", "task_body": {"messages": []}},
}

# Cline, src/core/api/providers/openai.ts, with native tool calls.
CLINE: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "You are Cline."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<task>Read.</task>"},
                {"type": "text", "text": "<environment_details>None</environment_details>"},
            ],
        },
    ],
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 200,
    "tools": [function("read_file", PATH, strict=False), function("execute_command", COMMAND, strict=False)],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
}

# Continue, packages/openai-adapters and core/llm: chats, and completions for the editor.
CONTINUE: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "You are in agent mode."},
        {"role": "user", "content": [{"type": "text", "text": "Read a file."}]},
    ],
    "max_tokens": 200,
    "temperature": 0.01,
    "stop": ["<end>", "</s>"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "tools": [function("builtin_read_file", PATH)],
    "parallel_tool_calls": False,
    "prediction": None,
    "reasoning_effort": None,
}
CONTINUE_EDITOR: dict[str, Any] = {
    "model": MODEL,
    "prompt": "Once upon a time there was a",
    "suffix": None,
    "max_tokens": 20,
    "temperature": 0.01,
    "top_p": None,
    "presence_penalty": None,
    "frequency_penalty": None,
    "stop": ["\n\n", "/src/"],
    "stream": True,
}
